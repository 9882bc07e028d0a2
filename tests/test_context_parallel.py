"""Context parallelism of Gated DeltaNet: one layer at every mesh, then the whole model."""

import collections
import itertools
import os

import pytest
import torch

from tests import hf, layer_cases, outside_trainer, ranks
from tests.draw import covering, in_sets, selected
from tests.training import assert_same_numbers, dry_run, train
from titan_gdn.assets import BYTE_TOKENIZER
from titan_gdn.config.load import ConfigError, load_config
from titan_gdn.models.qwen3_next import Qwen3NextArguments
from titan_gdn.ops.rules import GATED_DELTA_RULE, KIMI_DELTA_RULE
from titan_gdn.parallel.exchange.registry import EXCHANGES, traffic
from titan_gdn.parallel.traffic import LayerShape, ShardedBatch

PAIRS = covering(layer_cases.CASES, 2)
CASES = in_sets(
    layer_cases.CASES, fast=PAIRS, slow=covering(layer_cases.CASES, 3, start=PAIRS), name=layer_cases.name
)


@pytest.fixture(scope="module", params=layer_cases.LAYERS)
def matrix(request):
    """A layer, and the selected cases of it in one pool of four ranks."""
    cases = selected(request, "test_a_layer_gives_the_numbers_of_one_rank", "case")
    return request.param, ranks.run(layer_cases.matrix, 4, request.param, cases, timeout=850)


@pytest.mark.parametrize("case", CASES)
def test_a_layer_gives_the_numbers_of_one_rank(matrix, case):
    layer, records = matrix
    for errors, bitwise in (rank[layer_cases.name(case)] for rank in records):
        assert max(errors.values()) < 1e-5, errors
        if layer_cases.is_bitwise(layer, case):
            assert bitwise, "without TP the output is one rank's to the bit"


@pytest.mark.parametrize("layer", layer_cases.LAYERS)
def test_a_wrong_transition_would_be_seen(layer):
    """Inner segments hand on a good part of what they receive: with strong decay any state would pass."""
    counts = collections.Counter()
    for norms, worst in ranks.run(layer_cases.powers, 4, layer):
        for (p, segments), norm in norms.items():
            counts[segments] += 1
            assert segments >= 4
            assert norm >= 0.1 or p in (0, segments - 1)
        assert min(worst.values()) > 1e-3, worst
    assert counts == {4: 4, 8: 8}


@pytest.mark.parametrize("layer", layer_cases.LAYERS)
def test_a_document_does_not_depend_on_its_neighbors_on_other_ranks(layer):
    assert ranks.run(layer_cases.neighbors, 4, layer) == [[]] * 4


def test_token_numbers_come_back_in_place():
    assert ranks.run(layer_cases.round_trip_of_tokens, 4) == [[]] * 4


def test_a_wrong_order_is_an_error_on_every_rank():
    for said in ranks.run(layer_cases.wrong_orders, 4, timeout=60):
        assert len(said) == 4
        assert all("did not arrive in the declared order" in error for error in said)


def test_segments_shorter_than_the_convolution_are_an_error_on_every_rank():
    """Outside the trainer and in the bench, which no configuration protects."""
    for said in ranks.run(layer_cases.short_segments, 4, timeout=60):
        *short, odd, enough = said
        lengths = ((16, 8), (8, 4), (16, 8), (16, 8))
        assert short == [
            f'exchange = "state": segments of 2 tokens (training.seq_len = {length} over {parts}) are '
            "shorter than the 3 tokens that the convolution of 4 needs of the segment before"
            for length, parts in lengths
        ]
        assert "3 tokens of each of 4 ranks are not divisible by 2, the segments of a rank" in odd
        assert enough == "nothing"


SHAPE = {
    "width": 32,
    "output": 4 * 24,
    "key_heads": 4,
    "value_heads": 8,
    "key_dim": 8,
    "value_dim": 12,
    "channels": 4 * (16 + 24),
    "kernel_size": 4,
}
SHAPES = {
    "gated_delta_net": LayerShape(exchanged=4 * (16 + 24 + 4), rule=GATED_DELTA_RULE, **SHAPE),
    "kimi_delta_attention": LayerShape(
        exchanged=4 * (16 + 24 + 2), low_rank=6, rule=KIMI_DELTA_RULE, **SHAPE
    ),
}


@pytest.mark.parametrize("layer", layer_cases.LAYERS)
@pytest.mark.parametrize("world_size", in_sets([2, 4], fast=[2]))
def test_recorded_bytes_are_those_of_the_model(layer, world_size):
    """To the byte; and a state's are the same for 256 tokens and for 4,096."""
    over_cp = collections.defaultdict(set)
    for options, row in ranks.run(layer_cases.traffic, world_size, layer, timeout=200)[0]:
        mesh = (options.cp, options.tp, options.sequence_parallel, options.order)
        batch = ShardedBatch(options.batch, options.tokens, *mesh, itemsize=4, regather=options.regather)
        formula = traffic(row["exchange"], SHAPES[layer], batch)
        for way, sent in (("forward", formula.forward), ("backward", formula.backward)):
            assert row[f"cp {way} (bytes)"] == sent.cp_bytes, (row, options)
            assert row[f"tp {way} (bytes)"] == sent.tp_bytes, (row, options)
            over_cp[row["exchange"], mesh, options.regather, way].add(sent.cp_bytes)
    assert sum(sum(bytes_) > 0 for bytes_ in over_cp.values()) >= 8, "nothing crossed"
    assert all(len(bytes_) == 1 for bytes_ in over_cp.values())


def test_gathering_again_keeps_no_gathered_states_and_gives_the_same_numbers():
    for found in ranks.run(layer_cases.regathered, 4):
        assert found[False][0] < 1e-5 and found[True][0] < 1e-5
        assert found[True][1] < found[False][1]


CP, TP = "--parallelism.context_parallel_degree", "--parallelism.tensor_parallel_degree"
MESHES = {
    "cp 2": (2, CP, "2"),
    "dp 2, cp 2": (4, CP, "2", "--training.local_batch_size", "2"),
    "cp 2, tp 2": (4, CP, "2", TP, "2"),
    "cp 4": (4, CP, "4"),
}


RUNS = list(itertools.product(MESHES, EXCHANGES, ("headtail", "none")))


@pytest.mark.parametrize(("mesh", "exchange", "order"), in_sets(RUNS, fast=covering(RUNS, 1)))
def test_the_model_trains_as_on_one_rank(run, one_rank, mesh, exchange, order):
    compare(run, one_rank, MESHES[mesh], exchange, order, "spmd_types")


OTHER_BACKEND = [
    ("cp 2", "all_gather", "none"),
    ("cp 2, tp 2", "all_gather", "headtail"),
    ("cp 2, tp 2", "all_to_all", "headtail"),
    ("cp 2, tp 2", "state", "headtail"),
    ("cp 4", "state", "none"),
]


@pytest.mark.parametrize(("mesh", "exchange", "order"), in_sets(OTHER_BACKEND, fast=OTHER_BACKEND[:1]))
def test_the_other_backend_trains_alike(run, one_rank, mesh, exchange, order):
    compare(run, one_rank, MESHES[mesh], exchange, order, "partial_dtensor")


@pytest.mark.slow
def test_where_heads_do_not_divide_the_state_is_handed_on(run, one_rank):
    """Four key heads on eight ranks, and nobody had to say so."""
    records = run(8, CP, "4", TP, "2", "--parallelism.context_parallel_load_balancer", "headtail")
    assert_same_numbers(records, one_rank)


def compare(run, one_rank, mesh, exchange, order, backend):
    world_size, *argv = mesh
    argv += ["--linear_attention.exchange", exchange, "--parallelism.context_parallel_load_balancer", order]
    records = run(world_size, *argv, "--parallelism.spmd_backend", backend)
    assert_same_numbers(records, one_rank)


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("backend", in_sets([None, "aot_eager", "inductor"], fast=[None, "aot_eager"]))
def test_a_block_works_in_a_plain_program_and_compiles_without_a_graph_break(exchange, backend):
    errors = ranks.run(outside_trainer.block_on_a_mesh, 2, exchange, backend, timeout=280)
    assert max(errors) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_ten_compiled_and_checkpointed_steps_end_and_equal_eager_ones(tmp_path, exchange):
    """Collectives of the exchange and of FSDP in one backward: a reordering would hang (prime-rl #3195)."""
    _, overrides = hf.model(
        num_hidden_layers=2, layer_types=["linear_attention", "full_attention"], num_experts=0
    )
    path = hf.toml(str(tmp_path), overrides, training={"steps": 10})
    argv = ["--job.config_file", path, CP, "2", "--linear_attention.exchange", exchange]
    eager = ranks.run(train, 2, argv)[0]["loss"]
    argv += ["--activation_checkpoint.mode", "full", "--compile.enable", "--compile.backend", "aot_eager"]
    assert len(eager) == 10
    for record in ranks.run(train, 2, argv, timeout=290):
        assert record["loss"] == pytest.approx(eager, rel=1e-5)


def test_offsets_go_to_the_host_once_a_forward(monkeypatch):
    """Whatever the number of layers, and no layer reads a scalar (Relax #254)."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Reads(TorchDispatchMode):
        scalars = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            Reads.scalars += function.overloadpacket.__name__ in (
                "_local_scalar_dense",
                "nonzero",
                "is_nonzero",
            )
            return function(*args, **(kwargs or {}))

    transfers = []
    original = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda x: transfers.append(x.shape) or original(x))
    for layers in (2, 6):
        _, overrides = hf.model(num_hidden_layers=layers, num_experts=0)
        model = Qwen3NextArguments(**overrides).config().build()
        model.init_states()
        transfers.clear()
        Reads.scalars = 0
        with Reads():
            model(torch.randint(0, 264, (2, 64)), torch.arange(64).expand(2, 64))
        assert transfers == [(2, 64)]
        assert Reads.scalars == 1  # where the offsets are, of the copy on the host


def refused(*argv, world_size=4, **overrides):
    argv = [f"--model.overrides.{key}={value}" for key, value in overrides.items()] + list(argv)
    path = os.path.join(os.path.dirname(__file__), "..", "train_configs", "qwen3_next_debug.toml")
    with pytest.raises(ConfigError) as error:
        load_config(["--job.config_file", path, *argv], world_size)
    return str(error.value)


def test_heads_that_do_not_divide_are_refused_with_the_three_numbers():
    said = refused(CP, "2", TP, "4", "--linear_attention.exchange", "all_gather", world_size=8)
    assert all(
        words in said
        for words in (
            "4 key heads",
            "tensor_parallel_degree = 4",
            "context_parallel_degree = 2",
            'exchange = "state"',
        )
    )


def test_lengths_that_do_not_divide_are_refused_with_what_divides_them():
    assert "2 * parallelism.context_parallel_degree = 8" in refused(CP, "4", "--training.seq_len", "500")
    said = refused(CP, "2", TP, "2", "--training.seq_len", "500", "--training.local_batch_size", "1")
    assert "2 * parallelism.context_parallel_degree = 4 times parallelism.tensor_parallel_degree = 2" in said


def test_flex_attention_wants_whole_blocks(monkeypatch):
    from titan_gdn.layers.gated_attention import DocumentFlexAttention
    from titan_gdn.models.hybrid import gated
    from titan_gdn.models.qwen3_next.model import Qwen3NextArguments

    monkeypatch.setattr(gated, "device_type", "cuda")
    config = Qwen3NextArguments().config()
    assert isinstance(config.first_attention.inner_attention, DocumentFlexAttention.Config)
    assert "128 * parallelism.context_parallel_degree = 256" in refused(
        CP, "2", "--training.seq_len", "640", world_size=2
    )


def test_a_balancer_whose_order_depends_on_data_is_refused():
    assert "ptrr" in refused(CP, "2", "--parallelism.context_parallel_load_balancer", "ptrr")


def test_the_million_token_run_is_valid_at_full_size_and_runs_dry_when_scaled_down(tmp_path):
    path = os.path.join(os.path.dirname(__file__), "..", "train_configs", "qwen3_next_1M.toml")
    local = ["--model.hf_assets_path", BYTE_TOKENIZER, "--dataloader.dataset_path", os.path.dirname(__file__)]
    config = load_config(["--job.config_file", path, *local, "--checkpoint.no-initial_load_in_hf"], 64)
    assert config.training.seq_len == 1048576 == config.model_spec.model.max_seq_len
    small = {
        "vocab_size": 512,
        "dim": 256,
        "n_layers": 4,
        "head_dim": 32,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "n_experts": 64,
        "n_experts_per_token": 2,
        "expert_hidden_dim": 64,
        "shared_expert_hidden_dim": 64,
    }
    assert len(dry_run(path, tmp_path, *local, **small)["loss"]) == 1
