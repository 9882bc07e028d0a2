"""How a run is cut into pipeline stages, and which runs can be: what TorchTitan and torch's schedules ask.

The stages are made by `torchtitan.distributed.pipeline_parallel.pipeline_llm`. Every stage is given the
positions of each micro-batch and makes its own layout and decays of them (`HybridModel.forward`); ranks that
judge an order together (`ContextParallel.agreement_mesh`) are of one stage.
"""

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchtitan.config import ParallelismConfig
from torchtitan.distributed.pipeline_parallel import _generate_llm_fqn_per_model_part

if TYPE_CHECKING:
    from torchtitan.trainer import Trainer

ONE_STAGE = ("1F1B", "GPipe")
"""Schedules of one stage a rank; the others take two or more."""
SCHEDULES = (*ONE_STAGE, "Interleaved1F1B", "LoopedBFS")
SPLIT_BACKWARD = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
"""Schedules whose backwards for inputs and for weights are apart, which loses a gradient: `norm.weight` had
none, or one that was 29% off (torch 2.14, TorchTitan 0.3). Likely, not shown: norm and head are one FSDP
unit, whose backward the loss in chunks has run by then, and the norm's weight is no longer the graph's."""

_EMBEDDING_ALONE = (
    "a stage of the embedding alone has no parameters for the optimizer's group of norms and decays, and "
    "TorchTitan refuses a group that is empty on a stage"
)


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the model on a pipeline rank.

    Attributes:
        modules: names of the model's modules, `"tok_embeddings"`, `"layers.0"` and so on.
        in_flight: micro-batches that are between their forward and their backward when the rank holds most.
    """

    modules: tuple[str, ...]
    in_flight: int

    def holds(self, name: str) -> bool:
        """Whether a parameter or buffer of this name is its own."""
        return any(name.startswith(f"{module}.") for module in self.modules)


def stages_of(n_layers: int, config: "Trainer.Config") -> list[list[Stage]]:
    """The stages of each pipeline rank; without a pipeline, the model.

    Args:
        n_layers: of the model.
        config: a run that `check_pipeline` lets through.
    """
    parallelism, pp = config.parallelism, config.parallelism.pipeline_parallel_degree
    if pp == 1:
        parts, microbatches = _generate_llm_fqn_per_model_part(1, n_layers), 1
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
    """Into how many forwards a pipeline cuts a batch."""
    return config.training.local_batch_size // config.parallelism.pipeline_parallel_microbatch_size


def _in_flight(
    own: list[tuple[str, ...]], rank: int, microbatches: int, parallelism: ParallelismConfig
) -> list[int]:
    """Micro-batches of each of a rank's stages at the moment at which they are, by layers, the most.

    The order is that of torch's schedules: 1F1B and its interleaved form (`_get_warmup_ops` and
    `_get_1f1b_rank_ops` of torch.distributed.pipelining.schedules) begin with some forwards, then do one and
    a backward in turn, stage after stage in rounds of micro-batches. The others do all forwards first.
    """
    pp, count = parallelism.pipeline_parallel_degree, len(own)
    if pp == 1 or parallelism.pipeline_parallel_schedule not in ("1F1B", "Interleaved1F1B"):
        return [microbatches] * count
    if count == 1:
        return [min(microbatches, pp - rank)]
    a_round = microbatches // max(1, microbatches // pp)
    steps = count * microbatches
    warmup = min(steps, (count - 1) * a_round + 2 * (pp - 1 - rank))
    layers = [sum(name.startswith("layers.") for name in modules) for modules in own]
    held, most = Counter(), Counter()
    for step in range(steps):
        held[step // a_round % count] += 1
        most = max(most, held.copy(), key=lambda x: sum(n * layers[stage] for stage, n in x.items()))
        if step >= warmup:
            held[count - 1 - (step - warmup) // a_round % count] -= 1
    return [most[stage] for stage in range(count)]


def check_pipeline(n_layers: int, tied: bool, config: "Trainer.Config") -> None:
    """Check that the run's pipeline stages can be made.

    Args:
        n_layers: of the model.
        tied: embedding and head share one weight.
        config: the run.

    Raises:
        ValueError: says which keys contradict each other, and what is possible.
    """
    parallelism = config.parallelism
    degree = f"parallelism.pipeline_parallel_degree = {parallelism.pipeline_parallel_degree}"
    if parallelism.pipeline_parallel_degree == 1:
        return
    if tied:
        raise ValueError(
            f"{degree} puts the embedding and the head on different stages, but "
            "model.overrides.tie_word_embeddings makes them one weight: leave one of the two out"
        )
    if config.comm.mode == "fake_backend":
        raise ValueError(
            f"{degree} needs stages that talk to each other: in a dry run (comm.mode = 'fake_backend') set "
            "it to 1"
        )
    if parallelism.pipeline_parallel_schedule_csv:
        raise ValueError(
            f"parallelism.pipeline_parallel_schedule_csv = {parallelism.pipeline_parallel_schedule_csv!r} is "
            f"not supported: name one of {', '.join(SCHEDULES)} as parallelism.pipeline_parallel_schedule"
        )
    if parallelism.pipeline_parallel_schedule not in SCHEDULES:
        raise ValueError(
            f"parallelism.pipeline_parallel_schedule = {parallelism.pipeline_parallel_schedule!r} is not "
            f"supported: one that takes the backward apart loses the gradient of the last norm. Possible: "
            f"{', '.join(SCHEDULES)}"
        )
    stages = _count_stages(n_layers, parallelism)
    if parallelism.module_fqns_per_model_part is not None:
        _check_parts(n_layers, parallelism.module_fqns_per_model_part)
    else:
        _check_layers(n_layers, stages, parallelism)
    _check_microbatches(config, stages)


def _count_stages(n_layers: int, parallelism: ParallelismConfig) -> int:
    """How many stages the model is cut into: on each rank equally many, as many as the schedule takes."""
    schedule, pp = parallelism.pipeline_parallel_schedule, parallelism.pipeline_parallel_degree
    a_stage, parts = parallelism.pipeline_parallel_layers_per_stage, parallelism.module_fqns_per_model_part
    one = schedule in ONE_STAGE
    if parts is not None:
        stages, given = len(parts), f"parallelism.module_fqns_per_model_part of {len(parts)} parts"
    elif a_stage is not None:
        if a_stage < 1:
            raise ValueError(
                f"parallelism.pipeline_parallel_layers_per_stage = {a_stage}: expected at least 1"
            )
        weight = _less_layers(parallelism)
        stages = -(-(n_layers + sum(weight)) // a_stage)
        given = (
            f"parallelism.pipeline_parallel_layers_per_stage = {a_stage} of {n_layers} layers (and "
            f"{sum(weight)} for the embedding and the head, "
            "parallelism.pipeline_parallel_first_stage_less_layers and "
            "parallelism.pipeline_parallel_last_stage_less_layers)"
        )
    else:
        return pp if one else 2 * pp
    if stages % pp or (stages != pp) == one:
        wanted = f"{pp}" if one else f"a multiple of {pp}, at least {2 * pp}"
        raise ValueError(
            f"{given}: this makes {stages} stages, and parallelism.pipeline_parallel_schedule = {schedule!r} "
            f"on parallelism.pipeline_parallel_degree = {pp} takes {wanted}"
        )
    return stages


def _less_layers(parallelism: ParallelismConfig) -> tuple[int, int]:
    """For how many layers the embedding and the head count."""
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
    """Every stage has something to do, as TorchTitan deals layers out."""
    first, last = _less_layers(parallelism)
    needed = stages * max(first, last, 1) - first - last
    if n_layers < needed:
        raise ValueError(
            f"parallelism.pipeline_parallel_degree = {parallelism.pipeline_parallel_degree} with "
            f"parallelism.pipeline_parallel_schedule = {parallelism.pipeline_parallel_schedule!r} makes "
            f"{stages} stages, which the {n_layers} layers of the model do not fill: at least {needed} are "
            f"needed (with parallelism.pipeline_parallel_first_stage_less_layers = {first} and "
            f"parallelism.pipeline_parallel_last_stage_less_layers = {last})"
        )
    # The first stages have a layer more where layers and stages do not come out even.
    if first and first == -(-(n_layers + first + last) // stages):
        raise ValueError(
            f"{_EMBEDDING_ALONE}: {n_layers} layers on {stages} stages leave none for the first. Set "
            f"parallelism.pipeline_parallel_first_stage_less_layers = {first - 1}, or give it layers "
            "(model.overrides.n_layers, parallelism.pipeline_parallel_degree, "
            "parallelism.pipeline_parallel_schedule)"
        )


def _check_parts(n_layers: int, parts: list[list[str]]) -> None:
    """Stages given by hand are the model, in order."""
    modules = ["tok_embeddings", *(f"layers.{i}" for i in range(n_layers)), "norm", "lm_head"]
    if [name for part in parts for name in part] != modules or not all(parts) or len(parts[-1]) == 1:
        raise ValueError(
            f"parallelism.module_fqns_per_model_part = {parts}: expected 'tok_embeddings', 'layers.0' to "
            f"'layers.{n_layers - 1}', 'norm' and 'lm_head' once each and in this order, in parts of which "
            "none is empty, 'norm' and 'lm_head' together"
        )
    if parts[0] == ["tok_embeddings"]:
        raise ValueError(
            f"{_EMBEDDING_ALONE}: parallelism.module_fqns_per_model_part must give the first stage a layer"
        )


def _check_microbatches(config: "Trainer.Config", stages: int) -> None:
    """The schedule can go on with so many micro-batches."""
    parallelism, rows = config.parallelism, config.training.local_batch_size
    schedule, pp = parallelism.pipeline_parallel_schedule, parallelism.pipeline_parallel_degree
    size = parallelism.pipeline_parallel_microbatch_size
    count = microbatches_of(config)
    given = (
        "training.local_batch_size / parallelism.pipeline_parallel_microbatch_size = "
        f"{rows} / {size} = {count} is the number of micro-batches, of which "
        f"parallelism.pipeline_parallel_schedule = {schedule!r}"
    )
    if schedule == "1F1B" and count < stages:
        raise ValueError(f"{given} needs at least one for each of its {stages} stages")
    rounds = max(1, count // pp)
    if schedule == "Interleaved1F1B" and count % rounds:
        raise ValueError(
            f"{given} on parallelism.pipeline_parallel_degree = {pp} takes a multiple of its {rounds} "
            f"rounds, such as {rounds * pp}"
        )
