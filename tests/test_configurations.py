"""Configurations drawn at random: each is accepted, or refused in a sentence that names a key to change."""

import math
import random
import re
from itertools import chain

import pytest

from tests import hf, ranks
from tests.training import one_step
from titan_gdn.config.load import ConfigError, load_config

COUNT, TRAINED = 200, 30
KINDS = ("linear_attention", "full_attention")
CHUNKS = 8  # of the loss


class Draw(random.Random):
    """Draws what is plausible, and now and then what is not."""

    def value(self, plausible, odd=(), share=0.03):
        return self.choice(odd if odd and self.random() < share else plausible)


def drawn(draw):
    """World size and options of a configuration; options that are not drawn keep the flavor's value."""
    world_size = draw.choice([1, 2, 2, 4, 4, 4, 8, 8, 16, 64])
    options = _model(draw)
    options |= _mesh(draw, world_size, options)
    options |= _sizes(draw, world_size, options)
    options |= _layers(draw, options) | _policy(draw) | _quantized(draw)
    return world_size, {key: value for key, value in options.items() if value is not None}


def _model(draw):
    name, flavor = (
        draw.choice(["qwen3_next", "kimi_linear"]),
        draw.choice(["debug", "debug_moe", "debug_moe"]),
    )
    heads = draw.value([4, 8, 16], [3, 0])
    layers = draw.value([2, 2, 2, 4, 6, 8], [1, 0])
    options = {
        "model.name": name,
        "model.flavor": flavor,
        "model.overrides.n_layers": layers,
        "model.overrides.dim": draw.value([64, 96, 128], [100, -8]),
        "model.overrides.hidden_dim": draw.value([96, 128, 256], [98]),
        "model.overrides.n_heads": draw.value([heads, 8, 16], [6]),
        "model.overrides.n_linear_key_heads": heads,
        "model.overrides.n_linear_value_heads": draw.value([heads, 2 * heads], [heads + 1]),
        "model.overrides.linear_key_head_dim": draw.value([16, 32], [24, 0]),
        "model.overrides.linear_conv_kernel": draw.value([2, 3, 4, 8], [0, 40]),
        "model.overrides.n_key_value_heads": draw.value([2, 4], [3]) if name == "qwen3_next" else None,
        "model.overrides.layer_types": None,
        "model.overrides.n_experts": None,
        "model.overrides.expert_hidden_dim": None,
    }
    if draw.random() < 0.3:
        kinds = [draw.choice(KINDS) for _ in range(layers + draw.value([0], [1]))]
        options["model.overrides.layer_types"] = ",".join(kinds) or None
    if flavor == "debug_moe":
        options["model.overrides.n_experts"] = draw.value([4, 8, 16], [0, 1, 6])
        options["model.overrides.expert_hidden_dim"] = draw.value([32, 64, 96], [40, 12])
    return options


def _mesh(draw, world_size, options):
    """Degrees that divide the ranks, most of the time."""
    left, degrees = world_size, {}
    dense = ["data_parallel_replicate", "context_parallel", "tensor_parallel", "pipeline_parallel"]
    for key in draw.sample(dense, 4):
        degrees[key] = draw.value([d for d in (1, 2, 4, 8) if left % d == 0][:3], [0, 3, 8, 16])
        left = left // (degrees[key] or 1) or 1
    degrees["data_parallel_shard"] = draw.value([-1, left], [1, 5])
    sharing = left * degrees["context_parallel"] * degrees["tensor_parallel"]
    degrees["expert_parallel"] = draw.value([d for d in (1, 2, 4) if sharing % d == 0], [3, 16, 0])
    if options["model.flavor"] == "debug":
        degrees["expert_parallel"] = draw.value([1], [2])
    return {
        **{f"parallelism.{key}_degree": degree for key, degree in degrees.items()},
        "parallelism.enable_sequence_parallel": draw.choice(["true", "false"]),
        "parallelism.spmd_backend": draw.value(
            ["spmd_types", "partial_dtensor"], ["full_dtensor", "dtensor"]
        ),
        "parallelism.context_parallel_load_balancer": draw.value(["headtail", "none"], ["ptrr", "zigzag"]),
        "parallelism.pipeline_parallel_schedule": draw.value(
            ["1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS"], ["ZBVZeroBubble", "dualpipe"]
        ),
        "parallelism.pipeline_parallel_microbatch_size": draw.value([1, 1, 2], [0, 3]),
    }


def _sizes(draw, world_size, options):
    cp, tp, pp = (options[f"parallelism.{key}_parallel_degree"] for key in ("context", "tensor", "pipeline"))
    batch = draw.value([4, 8] if pp > 1 else [1, 2, 4], [0, 3])
    step = batch * world_size // max(1, cp * tp * pp)
    length = draw.choice([1, 1, 2]) * max(64, math.lcm(CHUNKS, 2 * max(1, tp)) * max(1, cp))
    return {
        "training.seq_len": draw.value([length], [length + 8, length + 1, 36, 0]),
        "training.local_batch_size": batch,
        "training.global_batch_size": draw.value([-1, step, 2 * step], [step + 1, 0]),
        "training.mixed_precision_param": draw.value(["float32", "float32", "bfloat16"], ["float16"]),
    }


def _layers(draw, options):
    layers = {
        "linear_attention.exchange": draw.value(
            ["auto", "auto", "all_to_all", "all_gather", "state", "state"], ["ring"]
        ),
        "linear_attention.regather": draw.choice(["true", "false"]),
        "linear_attention.kernel": draw.value(["auto", "torch"], ["fla", "triton"]),
        "model.overrides.lower_bound": draw.value(["none", -5], [0, 5]),
        "linear_attention.machine.across": draw.value(["infiniband", "efa", "tcp"], ["ethernet"]),
        "linear_attention.machine.tflops": draw.value([200, 400], [0]),
    }
    if options["model.name"] != "kimi_linear":
        del layers["model.overrides.lower_bound"]
    return layers


def _policy(draw):
    mode = draw.value(["none", "selective", "full", "memory_budget"], ["some"])
    compiled = mode == "memory_budget" or draw.random() < 0.15
    compiled = compiled != (draw.random() < 0.05)
    return {
        "activation_checkpoint.mode": mode,
        "activation_checkpoint.memory_budget": draw.value([0.3, 1], [2]) if mode == "memory_budget" else None,
        "activation_checkpoint.save_exchange": draw.choice(["true", "false"])
        if mode == "selective"
        else None,
        "compile.enable": "true" if compiled else "false",
        "compile.backend": draw.value(["aot_eager", "eager"], ["jit"]),
    }


def _quantized(draw):
    if draw.random() < 0.75:
        return {}
    if draw.random() < 0.1:
        return {"quantize.experts.name": draw.choice(["float8", "mxfp8", "nvfp4"])}
    name = draw.value(["float8"], ["mxfp8", "nvfp4", "int8"])
    emulate = draw.value(["true"], ["false"]) if name == "float8" else None
    return {"quantize.linear.name": name, "quantize.linear.emulate": emulate}


def argv(path, options):
    return ["--job.config_file", path, *(f"--{key}={value}" for key, value in options.items())]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return hf.toml(str(tmp_path_factory.mktemp("configurations")), {})


@pytest.fixture(scope="module")
def verdicts(path):
    """World size, options, and what is said against them, None where nothing is, for each configuration."""
    draw, found = Draw(7), []
    for _ in range(COUNT):
        world_size, options = drawn(draw)
        try:
            load_config(argv(path, options), world_size)
            reason = None
        except ConfigError as error:
            reason = str(error).replace(path, "")
        found.append((world_size, options, reason))
    return found


def test_what_is_accepted_is_varied(verdicts):
    """A third or so; each option has more than one value there, but for what needs a GPU."""
    accepted = [{"world_size": n, **options} for n, options, reason in verdicts if reason is None]
    assert COUNT / 4 < len(accepted) < COUNT / 2
    values = {
        key: {options.get(key) for options in accepted} for key in dict(chain(*map(dict.items, accepted)))
    }
    assert not {key: found for key, found in values.items() if len(found) < 2}
    assert {1, 2, 4} < values["world_size"]
    for key in ("context", "tensor", "pipeline", "expert"):
        assert {1, 2, 4} <= values[f"parallelism.{key}_parallel_degree"]
    assert values["linear_attention.exchange"] == {"auto", "all_to_all", "all_gather", "state"}
    assert values["activation_checkpoint.mode"] == {"none", "selective", "full", "memory_budget"}
    assert {"1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS"} <= {
        options["parallelism.pipeline_parallel_schedule"]
        for options in accepted
        if options["parallelism.pipeline_parallel_degree"] > 1
    }
    assert "float8" in values["quantize.linear.name"]


def test_every_refusal_names_a_key_that_was_given(verdicts):
    for world_size, options, reason in verdicts:
        if reason is not None:
            named = {key.rpartition(".")[2] for key in options} & set(re.findall(r"\w+", reason))
            assert named, f"{world_size} ranks, {options}: {reason}"


@pytest.fixture(scope="module")
def trained(verdicts):
    """Of what is accepted and small enough, the most varied: each brings the most values that are new."""
    left = [(n, options) for n, options, reason in verdicts if reason is None and affordable(n, options)]
    chosen, seen = [], set()
    while len(chosen) < TRAINED:
        chosen.append(max(left, key=lambda case: len(case[1].items() - seen)))
        left.remove(chosen[-1])
        seen |= chosen[-1][1].items()
    return chosen


def dry(options):
    """Whether one process can stand for all ranks. Stages talk, and so do experts where none deals out."""
    dealt = options["parallelism.spmd_backend"] == "spmd_types" or 1 in (
        options["parallelism.tensor_parallel_degree"],
        options["parallelism.expert_parallel_degree"],
    )
    return dealt and options["parallelism.pipeline_parallel_degree"] == 1


def affordable(world_size, options):
    """Few processes, and few layers where it is slow."""
    bfloat16 = options["training.mixed_precision_param"] == "bfloat16"
    slow = bfloat16 or options["compile.enable"] == "true"
    return (world_size <= 4 or dry(options)) and options["model.overrides.n_layers"] <= (2 if slow else 6)


def test_stages_and_dry_runs_are_trained(trained):
    degrees = [options["parallelism.pipeline_parallel_degree"] for _, options in trained]
    assert sum(degree > 1 for degree in degrees) >= 4
    assert {options["training.mixed_precision_param"] for _, options in trained} == {"float32", "bfloat16"}


@pytest.mark.slow
@pytest.mark.parametrize("number", range(TRAINED))
def test_what_is_accepted_trains(path, trained, number):
    world_size, options = trained[number]
    words = argv(path, options)
    if dry(options):
        losses = ranks.run(one_step, 1, [*words, "--comm.mode=fake_backend"], world_size)
    else:
        losses = ranks.run(one_step, world_size, words)
    known = [loss for loss in losses if loss is not None]
    assert known and all(map(math.isfinite, known)), options


@pytest.mark.parametrize(
    "asked",
    [
        ("--comm.mode=fake_backend", "--parallelism.expert_parallel_degree=2"),
        ("--debug.moe_force_load_balance",),
    ],
)
def test_experts_that_are_dealt_out_need_plain_tensors(path, monkeypatch, asked):
    monkeypatch.setenv("NGPU", "4")
    words = ["--job.config_file", path, "--parallelism.tensor_parallel_degree=2", *asked]
    load_config([*words, "--parallelism.spmd_backend=spmd_types"], 4)
    with pytest.raises(
        ConfigError, match="spmd_backend = 'partial_dtensor': set the backend to 'spmd_types'"
    ):
        load_config([*words, "--parallelism.spmd_backend=partial_dtensor"], 4)


@pytest.mark.parametrize("ranks_given", [None, "", "0", "many"])
def test_a_dry_run_without_a_number_of_ranks_is_refused(path, monkeypatch, ranks_given):
    monkeypatch.delenv("NGPU", raising=False)
    if ranks_given is not None:
        monkeypatch.setenv("NGPU", ranks_given)
    with pytest.raises(ConfigError, match="comm.mode = .*NGPU"):
        load_config(["--job.config_file", path, "--comm.mode=fake_backend"], 1)


def test_ranks_that_are_simulated_in_one_process_are_refused(path):
    with pytest.raises(ConfigError, match="comm.mode = .*Possible: default, fake_backend"):
        load_config(["--job.config_file", path, "--comm.mode=local_tensor"], 1)
