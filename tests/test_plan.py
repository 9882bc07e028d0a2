"""The planner against the formulas, the trainer's own allocations and the shards of parallelized models."""

import itertools
import json
import os
import time
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B
from torch.profiler import ProfilerActivity, profile
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.tools.logging import logger

from tests import ranks
from tests.draw import covering, in_sets
from titan_gdn.bench.rule import _peak_of_allocations
from titan_gdn.config.load import load_config
from titan_gdn.layers.linear_attention import LinearAttentionConfig
from titan_gdn.models.hybrid import gated
from titan_gdn.models.hybrid.pipeline import stages_of
from titan_gdn.models.kimi_linear import KimiLinearArguments
from titan_gdn.models.qwen3_next import Qwen3NextArguments
from titan_gdn.ops.rules import GATED_DELTA_RULE
from titan_gdn.parallel.cost import choose
from titan_gdn.parallel.exchange.registry import traffic
from titan_gdn.parallel.machine import Machine
from titan_gdn.parallel.sequence import SequenceLayout
from titan_gdn.parallel.traffic import LayerShape, ShardedBatch
from titan_gdn.plan.__main__ import main
from titan_gdn.plan.block_memory import block_memory
from titan_gdn.plan.plan import make_plan

QWEN, KIMI = "train_configs/qwen3_next_1M.toml", "train_configs/kimi_linear_1M.toml"
LARGE = "train_configs/qwen3_next_80B.toml"
GDN = LayerShape(
    width=2048, exchanged=8256, output=4096, key_heads=16, value_heads=32, key_dim=128, value_dim=128,
    channels=8192, kernel_size=4, rule=GATED_DELTA_RULE,
)  # fmt: skip
MILLION = ShardedBatch(1, 2**20, cp=2, tp=8, sequence_parallel=True, order="headtail", itemsize=2)


@pytest.fixture(autouse=True)
def log_level():
    """The command silences TorchTitan's log, of which other tests read."""
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture
def printed(capsys):
    """What the command prints, spaces and lines folded; nothing goes to stderr."""

    def printed(*argv, file=QWEN, world_size=64):
        main(["--job.config_file", file, "--world-size", str(world_size), *argv])
        out, err = capsys.readouterr()
        assert err == ""
        return " ".join(out.split())

    return printed


@pytest.fixture
def refused(capsys):
    """The sentence with which the command refuses."""

    def refused(*argv):
        with pytest.raises(SystemExit) as ended:
            main(list(argv))
        out, err = capsys.readouterr()
        assert ended.value.code == 2 and out == ""
        assert err.startswith("titan_gdn: ") and "Traceback" not in err
        return err

    return refused


def test_the_million_token_runs_say_what_they_take_and_why(printed):
    begin = time.perf_counter()
    told = printed()
    assert time.perf_counter() - begin < 60  # 4 s alone; the rest of the 20 is imports
    why = choose(GDN, MILLION, Machine(), recompute=True, layers=36)
    assert f"auto takes {why.name}: {' '.join(why.reason.split())}" in told
    assert "Gated DeltaNet, 36 layers" in told and "79.67 B parameters" in told
    assert "It fits a device of 80 GiB" in told

    told = printed("--linear_attention.exchange", "all_gather", file=KIMI)
    assert "The configuration names all_gather; auto would take state: " in told
    assert "Kimi Delta Attention, 20 layers" in told and "49.12 B parameters" in told


def test_json_is_all_that_is_printed_and_holds_the_traffic(printed):
    plan = json.loads(printed("--json", "--linear_attention.exchange", "all_to_all"))
    (kind,) = plan["linear_attention"]
    assert (kind["named"], kind["taken"], kind["layers"]) == ("all_to_all", "all_to_all", 36)
    for name, told in kind["exchanges"].items():
        sent = traffic(name, GDN, MILLION)
        for way in ("forward", "backward"):
            assert told[way]["cp_bytes"] == getattr(sent, way).cp_bytes > 0
            assert told[way]["tp_bytes"] == getattr(sent, way).tp_bytes > 0
        assert told["time"]["total"] > 0
        assert (told["transient"], told["kept"]) == (sent.transient, sent.kept)
    assert set(kind["exchanges"]) == {"all_to_all", "all_gather", "state"}
    assert plan["degrees"]["dp_shard"] == 4 and plan["parameters"] == 79674391296
    assert plan["flops_per_token"] == 640197616128


def test_the_table_charges_what_the_choice_charges_under_selective_checkpointing(printed):
    plan = json.loads(printed("--json", "--activation_checkpoint.mode", "selective"))
    (kind,) = plan["linear_attention"]
    saved = ("all_to_all", "state")
    costs = choose(GDN, MILLION, Machine(), recompute=True, layers=36, saved=saved).costs
    assert {name: told["time"]["total"] for name, told in kind["exchanges"].items()} == pytest.approx(
        {name: cost.total for name, cost in costs.items()}
    )
    assert costs["state"].recompute < costs["state"].forward  # else nothing is shown


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_memory_counts_what_the_mode_keeps_of_an_exchange(mode, printed):
    """36 layers; and four micro-batches of the first of 4 pipeline ranks, of whose 12 layers 9 are linear."""
    pipeline = ["--parallelism.pipeline_parallel_degree", "4", "--training.local_batch_size", "4"]
    pipeline += ["--parallelism.expert_parallel_degree", "16"]
    sent = traffic("state", GDN, MILLION)
    a_layer = {"none": sent.kept, "full": 0, "selective": sent.computed + sent.collected}[mode]
    for argv, layers in (([], 36), (pipeline, 4 * 9)):
        plan = json.loads(printed("--json", "--activation_checkpoint.mode", mode, *argv))
        assert plan["memory"]["exchange"] == layers * a_layer


def test_active_parameters_are_those_of_the_published_name(printed):
    # A3B: without embedding and head, 3 B of 80 B.
    plan = json.loads(printed("--json"))
    assert plan["active_parameters"] - 2 * 151936 * 2048 == pytest.approx(3.25e9, rel=0.01)


def test_a_sweep_marks_what_is_impossible_and_where_the_choice_changes(printed):
    long = ["--training.seq_len", "262144", "--parallelism.tensor_parallel_degree", "1"]
    told = printed(*long, "--sweep", "cp=16,8,4,2,1,3")
    assert "Between cp 2 and 4 auto changes from all_gather to all_to_all." in told
    assert "Between cp 8 and 16 auto changes from all_to_all to state." in told
    assert told.count("auto changes") == 2
    assert "cp 3 is impossible: " in told and "expected a product of WORLD_SIZE = 64" in told

    told = printed("--sweep", "cp=2,4")  # of 2 key heads a TP rank
    assert "cp 4: all_to_all and all_gather are impossible because the 16 key heads are not divisible" in told
    assert "and state" not in told


def test_data_parallelism_takes_the_ranks_that_a_sweep_leaves(printed):
    fixed = ["--parallelism.data_parallel_shard_degree", "4", "--json"]
    told = json.loads(printed(*fixed, "--sweep", "cp=2,4"))["sweep"]
    assert told["key"] == "cp"
    assert [told["values"][cp][0]["batch"]["cp"] for cp in ("2", "4")] == [2, 4]
    lengths = json.loads(printed("--json", "--sweep", "seq_len=4096,1048576"))["sweep"]["values"]
    state = [lengths[length][0]["exchanges"]["state"]["forward"] for length in ("4096", "1048576")]
    assert state[0]["cp_bytes"] == state[1]["cp_bytes"]


@pytest.mark.parametrize("name", ["float8", "mxfp8"])
def test_what_no_hardware_here_quantizes_is_planned(name, printed):
    assert "Memory of a rank" in printed("--quantize.linear.name", name, "--quantize.experts.name", name)


def test_a_plot_is_drawn(printed, tmp_path):
    path = str(tmp_path / "cp.png")
    printed("--plot", path, file=KIMI)
    with open(path, "rb") as file:
        assert file.read(4) == b"\x89PNG"


def test_the_published_ratio_is_reproduced_from_the_published_widths(printed):
    # D 4096 and 64 heads of 128, where the gather was published to send five times less at CP 2.
    widths = {"dim": 4096, "n_linear_key_heads": 64, "n_linear_value_heads": 64}
    argv = [word for key, value in widths.items() for word in (f"--model.overrides.{key}", str(value))]
    (kind,) = json.loads(printed(*argv, "--json", file=KIMI))["linear_attention"]
    ours, published = kind["way_in"]
    assert published == pytest.approx(64 * (5 * 128 + 1) / (2 * 4096))
    assert published == pytest.approx(5.0, abs=0.01)
    assert ours == pytest.approx(64 * (3 * 128 + 1) / (2 * 4096) + 128 / 4096)
    # What is said is what is planned: both without the way out, which is the same for both.
    sent = {name: kind["exchanges"][name]["forward"]["cp_bytes"] for name in ("all_to_all", "all_gather")}
    out = 2 * 2**19 * (64 * 128 // 8) // 2
    assert (sent["all_to_all"] - out) / (sent["all_gather"] - out) == pytest.approx(ours)


def test_what_this_machine_lacks_is_no_matter(printed):
    told = printed(
        "--linear_attention.kernel", "fla", "--training.enable_cpu_offload", "--checkpoint.async_mode",
        "async_with_pinned_mem", "--comm.mode", "fake_backend", file=LARGE,
    )  # fmt: skip
    assert "Without context parallelism there is no exchange." in told
    assert "parameters, sharded 0.00" in told


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "--job.config_file FILE.toml, the run to plan, is missing"),
        (["--job.config_file", QWEN], "--world-size N, the number of ranks to plan for, is missing"),
        (["--job.config_file", QWEN, "--world-size", "0"], "--world-size 0: expected"),
        (["--job.config_file", QWEN, "--world-size", "many"], "--world-size many: expected"),
        (["--job.config_file", QWEN, "--world-size"], "--world-size"),
        (["--job.config_file", QWEN, "--world-size", "48", "--training.stepps", "1"], 'Did you mean "steps"'),
        (["--job.config_file", QWEN, "--world-size", "60"], "expected a product of WORLD_SIZE = 60"),
        (["--job.config_file", "nowhere.toml", "--world-size", "64"], "No such file"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_a_sentence(refused, argv, words):
    assert words in refused(*argv)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (["--sweep", "dp=1,2"], "--sweep dp=1,2: expected KEY=V1,V2"),
        (["--sweep", "cp=1,,2"], "--sweep cp=1,,2"),
        (["--sweep", "cp=0"], "--sweep cp=0"),
        (["--sweep", "cp"], "--sweep cp:"),
        (["--plot", "x.pdf"], "--plot x.pdf: expected a file *.png"),
        (["--plot", "nowhere/x.png"], "--plot nowhere/x.png"),
    ],
)
def test_sweeps_and_plots_are_refused_before_anything_is_read(refused, option, words):
    assert words in refused("--job.config_file", "nowhere.toml", "--world-size", "64", *option)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--parallelism.tensor_parallel_degree 3", "product of WORLD_SIZE = 64"),
        ("--linear_attention.exchange all_to_all --parallelism.context_parallel_degree 4", "16 key heads"),
        ("--training.seq_len 1000064", "128 * parallelism.context"),  # of FlexAttention, on GPUs
        ("--training.seq_len 2097152", "rotary"),
        ("--sweep cp=5,7 --plot cp.png", "--plot: all values of the sweep are impossible"),
        ("--parallelism.context_parallel_degree 1 --sweep seq_len=8192 --plot cp.png", "--plot: without"),
        ("--linear_attention.machine.memory 1 --parallelism.context_parallel_degree 1", None),
        ("--activation_checkpoint.mode selective "
         "--activation_checkpoint.force_recompute_mm_shapes_by_fqns moe", "[activation_checkpoint]: force_"),
    ],
)  # fmt: skip
def test_degrees_sizes_and_the_model_are_checked(printed, refused, argv, words):
    if words is None:
        assert "does not fit a device of 1 GiB" in printed(*argv.split())
    else:
        assert words in refused("--job.config_file", QWEN, "--world-size", "64", *argv.split())


def test_help_explains_the_options(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    told = capsys.readouterr().out
    assert ended.value.code == 0
    for word in ("--world-size N", "--json", "--sweep KEY=V1,V2,...", "--plot FILE.png", "--section.key"):
        assert word in told


MESHES = {
    "tp 2, cp 2": (8, "--parallelism.tensor_parallel_degree 2 --parallelism.context_parallel_degree 2"),
    "hsdp": (8, "--parallelism.data_parallel_replicate_degree 2"),
    "more ranks than experts": (16, "--parallelism.tensor_parallel_degree 2"),
    "uneven": (6, "--model.overrides.vocab_size 267"),
}


STORED = list(itertools.product(MESHES, ("qwen3_next", "kimi_linear"), ("spmd_types", "partial_dtensor")))


@pytest.mark.parametrize(("mesh", "model", "backend"), in_sets(STORED, fast=covering(STORED, 1)))
def test_stored_bytes_are_those_of_the_shards_of_a_parallelized_model(mesh, model, backend):
    world_size, argv = MESHES[mesh]
    if mesh == "more ranks than experts" and backend == "partial_dtensor":
        argv = ""  # whose FSDP mesh is without TP
    argv = [
        "--job.config_file", f"train_configs/{model}_debug.toml", "--model.flavor", "debug_moe",
        "--training.local_batch_size", "1", "--parallelism.spmd_backend", backend, *argv.split(),
    ]  # fmt: skip
    (sizes,) = ranks.run(shards, 1, argv, world_size)
    memory = make_plan(load_config(argv, world_size, here=False), world_size).memory
    assert memory.parameters == memory.gradients == sum(sizes.values())
    assert memory.optimizer == 2 * memory.parameters


def shards(argv, world_size):
    """Bytes of the first rank's shards, which are the longest."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.utils import set_spmd_backend

    config = load_config(argv, world_size)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    set_spmd_backend(config.parallelism.spmd_backend)
    dims = ParallelDims.from_config(config.parallelism, world_size)
    dims.build_mesh()
    model_config = config.model_spec.model
    model_config.update_from_config(config=config)
    with torch.device("meta"):
        model = model_config.build()
    config.model_spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=config.training,
        parallelism=config.parallelism,
        compile_config=config.compile,
        ac_config=None,
        dump_folder="",
    )
    return {name: x.to_local().nbytes for name, x in model.named_parameters()}


BLOCKS = {
    "gated delta net": (Qwen3NextArguments, {"n_experts": 0}, "linear_attention"),
    "gated attention": (Qwen3NextArguments, {"n_experts": 0}, "full_attention"),
    "gated delta net, experts": (
        Qwen3NextArguments,
        {"n_experts": 8, "n_experts_per_token": 2},
        "linear_attention",
    ),
    "kimi delta attention": (KimiLinearArguments, {"n_experts": 0}, "linear_attention"),
    "latent attention": (KimiLinearArguments, {"n_experts": 0}, "full_attention"),
}
POLICIES = {"none": None, "selective": SelectiveAC.Config(), "full": FullAC.Config()}


KEPT = list(itertools.product(BLOCKS, POLICIES))


@pytest.mark.parametrize(("name", "policy"), in_sets(KEPT, fast=covering(KEPT, 1)))
def test_what_a_block_keeps_and_holds_is_what_the_allocator_says(name, policy):
    build, options, kind = BLOCKS[name]
    widths = {"dim": 128, "n_heads": 4, "n_linear_key_heads": 4, "n_linear_value_heads": 4}
    widths |= {"linear_key_head_dim": 32, "linear_value_head_dim": 32, "hidden_dim": 384}
    widths |= {"expert_hidden_dim": 96, "shared_expert_hidden_dim": 96}
    config = build(n_layers=1, layer_types=[kind], **widths, **options).config().layers[0]
    if config.linear_attention is not None:
        config.linear_attention.run = LinearAttentionConfig(kernel="torch")

    def checkpointed(block):
        policy_ = POLICIES[policy]
        return block if policy_ is None else policy_.build()._wrap_block(block, base_fqn="layers.0")

    batch = ShardedBatch(2, 2048, cp=1, tp=1, sequence_parallel=True, order="contiguous", itemsize=4)
    told = block_memory(config.build(), 128, batch, torch.float32, checkpointed)
    block = config.build()
    block.init_states()
    kept, peak = allocated(checkpointed(block), block, 2, 2048, 128)
    assert told.kept == pytest.approx(kept, rel=0.02)
    # What operators hold inside is not seen: scores of a block of queries, chunks of the rule.
    assert peak / 1.5 < told.peak < 1.02 * peak


def allocated(run, block, batch, length, width):
    """Bytes that the CPU's allocator gave to a forward and did not get back, and its peak with a backward."""
    given = torch.randn(batch, length, width, requires_grad=True)
    sequence = SequenceLayout.from_positions(torch.arange(length).expand(batch, -1))
    decay = None if block.linear_attention is None else block.linear_attention.decay()
    positions = torch.arange(length).expand(batch, -1)
    for backward in (False, True):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            out = run(given * 1, None, positions, decay, sequence=sequence)
            if backward:
                out.backward(torch.ones_like(out))
        events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
        if not backward:
            kept = sum(event.nbytes() for event in events) - out.nbytes
            del out
    return kept, _peak_of_allocations(profiler)


NO_SP = "--parallelism.tensor_parallel_degree 2 --parallelism.no-enable_sequence_parallel"
STEPS = {
    "full": (1, "qwen3_next", "--activation_checkpoint.mode full --model.overrides.n_layers 8"),
    "multi-token prediction": (1, "qwen3_5", "--model.overrides.mtp"),
    "multi-token prediction, most of it in the loss": (
        1, "qwen3_5", "--model.overrides.mtp --model.overrides.vocab_size 60000 --model.overrides.n_layers 1"
    ),
    "tp 2": (2, "qwen3_next", "--parallelism.tensor_parallel_degree 2"),
    "tp 2 without sequence parallelism": (2, "kimi_linear", NO_SP),
    "cp 2, all_gather": (
        2, "kimi_linear", "--parallelism.context_parallel_degree 2 --linear_attention.exchange all_gather"
    ),
    "cp 2, state": (
        2, "qwen3_next", "--parallelism.context_parallel_degree 2 --linear_attention.exchange state"
    ),
    "cp 2, state, selective": (
        2, "qwen3_next", "--parallelism.context_parallel_degree 2 --linear_attention.exchange state "
        "--activation_checkpoint.mode selective"
    ),
    "cp 2, all_to_all, selective": (
        2, "kimi_linear", "--parallelism.context_parallel_degree 2 --linear_attention.exchange all_to_all "
        "--activation_checkpoint.mode selective"
    ),
    "pp 2, 1F1B": (2, "qwen3_next", "--parallelism.pipeline_parallel_degree 2"),
    "pp 2, Interleaved1F1B": (
        2, "kimi_linear", "--parallelism.pipeline_parallel_degree 2 --model.overrides.n_layers 8 "
        "--parallelism.pipeline_parallel_schedule Interleaved1F1B"
    ),
    "pp 2, GPipe, full": (
        2, "qwen3_next", "--parallelism.pipeline_parallel_degree 2 "
        "--parallelism.pipeline_parallel_schedule GPipe --activation_checkpoint.mode full"
    ),
}  # fmt: skip


@pytest.mark.parametrize("step", in_sets(STEPS, fast=["cp 2, state, selective", "pp 2, 1F1B"]))
def test_a_step_of_the_trainer_allocates_what_is_planned(step, tmp_path):
    world_size, model, argv = STEPS[step]
    argv = [
        "--job.config_file", f"train_configs/{model}_debug.toml", "--job.dump_folder", str(tmp_path),
        "--training.seq_len", "1024", "--training.steps", "2", "--metrics.no-enable_tensorboard",
        "--linear_attention.kernel", "torch", *argv.split(),
    ]  # fmt: skip
    told = ranks.run(peak_of_a_step, world_size, argv, timeout=300)
    plan = make_plan(load_config(argv, world_size, here=False), world_size)
    memory = plan.memory
    peak, buffers = told[memory.pipeline_rank * world_size // plan.dims.pp]
    assert memory.buffers == buffers
    planned = memory.total - memory.parameters - memory.optimizer - memory.buffers
    assert planned / 1.2 < peak < 1.2 * planned


def test_multi_token_prediction_is_planned_on_a_machine_with_gpus(monkeypatch):
    """Its attention runs with fake tensors, as that of all layers, and its idle experts are idle."""
    monkeypatch.setattr(gated, "device_type", "cuda")
    argv = ["--job.config_file", "train_configs/qwen3_5_debug.toml", "--model.flavor", "debug_moe"]
    plans = [
        make_plan(load_config([*argv, *more], 1, here=False), 1) for more in ([], ["--model.overrides.mtp"])
    ]
    idle = [plan.parameters - plan.active for plan in plans]
    assert idle[1] - idle[0] == 3 * 128 * 96 * (8 - 2)


ORDERS = {
    "one stage a rank": (4, 1, 8),
    "two": (2, 2, 4),
    "more ranks than micro-batches": (4, 2, 2),
    "three, five rounds": (2, 3, 10),
}


@pytest.mark.parametrize("order", ORDERS)
def test_micro_batches_in_flight_are_those_of_torchs_schedules(order):
    """Of what a rank does in turn by torch, the most layers that are between forward and backward."""
    pp, count, microbatches = ORDERS[order]
    schedule = "1F1B" if count == 1 else "Interleaved1F1B"
    options = {"degree": pp, "schedule": schedule}
    if count > 2:
        options["layers_per_stage"] = -(-18 // (pp * count))
    config = load_config(
        [
            "--job.config_file", "train_configs/qwen3_next_debug.toml", "--model.overrides.n_layers", "16",
            "--training.local_batch_size", str(microbatches),
            *(f"--parallelism.pipeline_parallel_{key}={value}" for key, value in options.items()),
        ],
        pp,
        here=False,
    )  # fmt: skip
    pipeline = stages_of(16, config)
    assert [len(stages) for stages in pipeline] == [count] * pp
    for rank, stages in enumerate(pipeline):
        layers = [sum(name.startswith("layers.") for name in stage.modules) for stage in stages]
        told = sum(n * stage.in_flight for n, stage in zip(layers, stages, strict=True))
        assert told == most_in_flight(rank, pp, layers, microbatches)
    names = [stage.modules for i in range(count) for stages in pipeline for stage in [stages[i]]]
    assert [x for part in names for x in part] == [
        "tok_embeddings", *(f"layers.{i}" for i in range(16)), "norm", "lm_head"
    ]  # fmt: skip


def most_in_flight(rank, pp, layers, microbatches):
    if len(layers) == 1:  # torch does not list what this schedule does: a forward for each stage that follows
        return layers[0] * min(microbatches, pp - rank)
    rounds = max(1, microbatches // pp)
    sizes = {
        "n_local_stages": len(layers), "microbatches_per_round": microbatches // rounds,
        "pp_group_size": pp, "_n_microbatches": microbatches,
    }  # fmt: skip
    held, most = 0, 0
    for action in ScheduleInterleaved1F1B._calculate_single_rank_operations(SimpleNamespace(**sizes), rank):
        if action is not None:
            forward = action.computation_type.name == "FORWARD"
            held += layers[action.stage_index // pp] * (1 if forward else -1)
            most = max(most, held)
    assert held == 0
    return most


def peak_of_a_step(argv):
    """Bytes that the second step allocates at most, when the optimizer has its averages, and of buffers."""
    config = load_config(argv, int(os.environ["WORLD_SIZE"]))
    trainer = config.build()
    step, peaks = trainer.train_step, []

    def watched(*args):
        if trainer.step == 1:
            step(*args)
            return
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            step(*args)
        peaks.append(_peak_of_allocations(profiler))

    trainer.train_step = watched
    trainer.train()
    trainer.close()
    buffers = {x.data_ptr(): x.nbytes for model in trainer.model_parts for x in model.buffers()}
    return peaks[0], sum(buffers.values())
