"""Splits a model into pipeline stages, and checks that TorchTitan and torch's schedules support the split.

`torchtitan.distributed.pipeline_parallel.pipeline_llm` builds the stages. Every stage receives the positions
of each micro-batch and computes its own sequence layout and decays (`HybridModel.forward`). The ranks of
`ContextParallel.agreement_mesh` belong to one stage.
"""

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchtitan.config import ParallelismConfig
from torchtitan.distributed.pipeline_parallel import _generate_llm_fqn_per_model_part

if TYPE_CHECKING:
    from torchtitan.trainer import Trainer

ONE_STAGE = ("1F1B", "GPipe")
"""Schedules with one stage per rank; the others take two or more."""
SCHEDULES = (*ONE_STAGE, "Interleaved1F1B", "LoopedBFS")
SPLIT_BACKWARD = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
"""Schedules that are not supported, because they compute gradients of inputs and of weights separately.

With them `norm.weight` had no gradient, or one with an error of 29% (torch 2.14, TorchTitan 0.3). The likely
cause, which is not proven: norm and head form one FSDP unit, the chunked loss runs the backward of this unit
first, and the graph then no longer contains the norm's weight."""

_EMBEDDING_ALONE = (
    "a stage with the embedding alone has no parameters for the optimizer's group of norms and decays, and "
    "TorchTitan does not support a group that is empty on a stage"
)


@dataclass(frozen=True, slots=True)
class Stage:
    """A pipeline stage on a rank.

    Attributes:
        modules: names of the model's modules, `"tok_embeddings"`, `"layers.0"` and so on.
        in_flight: number of micro-batches between forward and backward when the rank holds the most.
    """

    modules: tuple[str, ...]
    in_flight: int

    def holds(self, name: str) -> bool:
        """Whether the parameter or buffer `name` is on this stage."""
        return any(name.startswith(f"{module}.") for module in self.modules)


def stages_of(n_layers: int, config: "Trainer.Config", mtp: bool = False) -> list[list[Stage]]:
    """Returns the stages of each pipeline rank. Without a pipeline, there is one stage, the whole model.

    Args:
        n_layers: number of layers of the model.
        config: a run that `check_pipeline` accepts.
        mtp: whether the model has multi-token prediction, which needs a run without pipeline stages.
    """
    parallelism, pp = config.parallelism, config.parallelism.pipeline_parallel_degree
    if pp == 1:
        [modules], microbatches = _generate_llm_fqn_per_model_part(1, n_layers), 1
        parts = [[*modules, "mtp"] if mtp else modules]
    else:
        parts = parallelism.module_fqns_per_model_part or _generate_llm_fqn_per_model_part(
            _count_stages(n_layers, parallelism), n_layers, *_less_layers(parallelism)
        )
        microbatches = microbatches_of(config)
    ranks = []
    for rank in range(pp):
        own = [tuple(part) for part in parts[rank::pp]]
        ranks.append(
            [Stage(*x) for x in zip(own, _in_flight(own, rank, microbatches, parallelism), strict=True)]
        )
    return ranks


def microbatches_of(config: "Trainer.Config") -> int:
    """Returns the number of micro-batches into which a pipeline splits a batch."""
    return config.training.local_batch_size // config.parallelism.pipeline_parallel_microbatch_size


def _in_flight(
    own: list[tuple[str, ...]], rank: int, microbatches: int, parallelism: ParallelismConfig
) -> list[int]:
    """Returns the micro-batches in flight on each stage of a rank when it holds the most activations.

    The order is that of torch's schedules. 1F1B and its interleaved form (`_get_warmup_ops` and
    `_get_1f1b_rank_ops` of torch.distributed.pipelining.schedules) begin with some forwards, then alternate
    one forward and one backward, and switch stages after each round of micro-batches. The others run all
    forwards first.

    Args:
        own: the modules of each stage of the rank.
        rank: the pipeline rank.
        microbatches: number of micro-batches in a batch.
        parallelism: degree and schedule of the pipeline.
    """
    pp, count = parallelism.pipeline_parallel_degree, len(own)
    if pp == 1 or parallelism.pipeline_parallel_schedule not in ("1F1B", "Interleaved1F1B"):
        return [microbatches] * count
    if count == 1:
        return [min(microbatches, pp - rank)]
    per_round = microbatches // max(1, microbatches // pp)
    steps = count * microbatches
    warmup = min(steps, (count - 1) * per_round + 2 * (pp - 1 - rank))
    layers = [sum(name.startswith("layers.") for name in modules) for modules in own]
    held, most = Counter(), Counter()
    for step in range(steps):
        held[step // per_round % count] += 1
        most = max(most, held.copy(), key=lambda x: sum(n * layers[stage] for stage, n in x.items()))
        if step >= warmup:
            held[count - 1 - (step - warmup) // per_round % count] -= 1
    return [most[stage] for stage in range(count)]


def check_pipeline(n_layers: int, tied: bool, mtp: bool, config: "Trainer.Config") -> None:
    """Checks that the model can be split into the pipeline stages of a run.

    Args:
        n_layers: number of layers of the model.
        tied: whether embedding and head share one weight.
        mtp: whether the model predicts the token after the next.
        config: the run.

    Raises:
        ValueError: names the keys that contradict each other, and what is possible.
    """
    parallelism = config.parallelism
    degree = f"parallelism.pipeline_parallel_degree = {parallelism.pipeline_parallel_degree}"
    if parallelism.pipeline_parallel_degree == 1:
        return
    if tied:
        raise ValueError(
            f"{degree} puts the embedding and the head on different stages, but "
            "model.overrides.tie_word_embeddings makes them one weight: remove one of the two keys"
        )
    if mtp:
        raise ValueError(
            f"model.overrides.mtp = true does not support {degree}: multi-token prediction on the last stage "
            "needs the embedding, which is on the first; remove one of the two keys"
        )
    if config.comm.mode == "fake_backend":
        raise ValueError(
            f"{degree} needs communication between stages: in a dry run (comm.mode = 'fake_backend') set it "
            "to 1"
        )
    if parallelism.pipeline_parallel_schedule_csv:
        raise ValueError(
            f"parallelism.pipeline_parallel_schedule_csv = {parallelism.pipeline_parallel_schedule_csv!r} is "
            f"not supported: set parallelism.pipeline_parallel_schedule to one of {', '.join(SCHEDULES)}"
        )
    if parallelism.pipeline_parallel_schedule not in SCHEDULES:
        raise ValueError(
            f"parallelism.pipeline_parallel_schedule = {parallelism.pipeline_parallel_schedule!r} is not "
            "supported: schedules that split the backward lose the gradient of the last norm. Possible: "
            f"{', '.join(SCHEDULES)}"
        )
    stages = _count_stages(n_layers, parallelism)
    if parallelism.module_fqns_per_model_part is not None:
        _check_parts(n_layers, parallelism.module_fqns_per_model_part)
    else:
        _check_layers(n_layers, stages, parallelism)
    _check_microbatches(config, stages)


def _count_stages(n_layers: int, parallelism: ParallelismConfig) -> int:
    """Returns the number of stages, after checking that the schedule supports it on this many ranks."""
    schedule, pp = parallelism.pipeline_parallel_schedule, parallelism.pipeline_parallel_degree
    per_stage, parts = parallelism.pipeline_parallel_layers_per_stage, parallelism.module_fqns_per_model_part
    one_per_rank = schedule in ONE_STAGE
    if parts is not None:
        stages, given = len(parts), f"parallelism.module_fqns_per_model_part with {len(parts)} parts"
    elif per_stage is not None:
        if per_stage < 1:
            raise ValueError(
                f"parallelism.pipeline_parallel_layers_per_stage = {per_stage}: expected at least 1"
            )
        less = sum(_less_layers(parallelism))
        stages = -(-(n_layers + less) // per_stage)
        given = (
            f"parallelism.pipeline_parallel_layers_per_stage = {per_stage} with {n_layers} layers (plus "
            f"{less} for the embedding and the head, parallelism.pipeline_parallel_first_stage_less_layers "
            "and parallelism.pipeline_parallel_last_stage_less_layers)"
        )
    else:
        return pp if one_per_rank else 2 * pp
    if stages % pp or (stages != pp) == one_per_rank:
        expected = f"{pp}" if one_per_rank else f"a multiple of {pp}, at least {2 * pp}"
        raise ValueError(
            f"{given}: this makes {stages} stages, but parallelism.pipeline_parallel_schedule = {schedule!r} "
            f"with parallelism.pipeline_parallel_degree = {pp} takes {expected}"
        )
    return stages


def _less_layers(parallelism: ParallelismConfig) -> tuple[int, int]:
    """Returns the numbers of layers as which the embedding and the head are counted."""
    less = {
        key: getattr(parallelism, f"pipeline_parallel_{key}_stage_less_layers") for key in ("first", "last")
    }
    for key, value in less.items():
        if value < 0:
            raise ValueError(
                f"parallelism.pipeline_parallel_{key}_stage_less_layers = {value}: expected at least 0"
            )
    return less["first"], less["last"]


def _check_layers(n_layers: int, stages: int, parallelism: ParallelismConfig) -> None:
    """Checks that no stage is empty, and that the first has a layer, if TorchTitan distributes the layers."""
    first, last = _less_layers(parallelism)
    needed = stages * max(first, last, 1) - first - last
    if n_layers < needed:
        raise ValueError(
            f"parallelism.pipeline_parallel_degree = {parallelism.pipeline_parallel_degree} with "
            f"parallelism.pipeline_parallel_schedule = {parallelism.pipeline_parallel_schedule!r} makes "
            f"{stages} stages, but the model has only {n_layers} layers: at least {needed} are needed (with "
            f"parallelism.pipeline_parallel_first_stage_less_layers = {first} and "
            f"parallelism.pipeline_parallel_last_stage_less_layers = {last})"
        )
    # If layers are not divisible by stages, TorchTitan gives the first stages one layer more.
    if first and first == -(-(n_layers + first + last) // stages):
        raise ValueError(
            f"{_EMBEDDING_ALONE}: with {n_layers} layers on {stages} stages, the first has no layer. Set "
            f"parallelism.pipeline_parallel_first_stage_less_layers = {first - 1}, or change "
            "model.overrides.n_layers, parallelism.pipeline_parallel_degree or "
            "parallelism.pipeline_parallel_schedule"
        )


def _check_parts(n_layers: int, parts: list[list[str]]) -> None:
    """Checks that `module_fqns_per_model_part` lists all modules of the model in order."""
    modules = ["tok_embeddings", *(f"layers.{i}" for i in range(n_layers)), "norm", "lm_head"]
    if [name for part in parts for name in part] != modules or not all(parts) or len(parts[-1]) == 1:
        raise ValueError(
            f"parallelism.module_fqns_per_model_part = {parts}: expected 'tok_embeddings', 'layers.0' to "
            f"'layers.{n_layers - 1}', 'norm' and 'lm_head' once each and in this order, no empty part, and "
            "'norm' and 'lm_head' in the same part"
        )
    if parts[0] == ["tok_embeddings"]:
        raise ValueError(
            f"{_EMBEDDING_ALONE}: add a layer to the first part of parallelism.module_fqns_per_model_part"
        )


def _check_microbatches(config: "Trainer.Config", stages: int) -> None:
    """Checks that the schedule supports the number of micro-batches."""
    parallelism, rows = config.parallelism, config.training.local_batch_size
    schedule, pp = parallelism.pipeline_parallel_schedule, parallelism.pipeline_parallel_degree
    size = parallelism.pipeline_parallel_microbatch_size
    count = microbatches_of(config)
    given = (
        "training.local_batch_size / parallelism.pipeline_parallel_microbatch_size = "
        f"{rows} / {size} = {count} is the number of micro-batches, but "
        f"parallelism.pipeline_parallel_schedule = {schedule!r}"
    )
    if schedule == "1F1B" and count < stages:
        raise ValueError(f"{given} needs at least one for each of its {stages} stages")
    rounds = max(1, count // pp)
    if schedule == "Interleaved1F1B" and count % rounds:
        raise ValueError(
            f"{given} with parallelism.pipeline_parallel_degree = {pp} needs a multiple of its {rounds} "
            f"rounds, such as {rounds * pp}"
        )
