"""Context parallelism of Gated DeltaNet: one layer at every mesh, then the whole model."""

import os

import pytest
import torch

from tests import hf, layer_cases, outside_trainer, ranks
from tests.training import assert_same_numbers, dry_run, train
from titan_gdn.assets import BYTE_TOKENIZER
from titan_gdn.config import ConfigError, load_config
from titan_gdn.models.qwen3_next import qwen3_next
from titan_gdn.parallel.traffic import LayerShape, choose, elements_in, elements_out


@pytest.fixture(scope="module", params=layer_cases.LAYERS)
def matrix(request):
    """A layer, and all its cases in one pool of four ranks; the worst rank counts."""
    return request.param, ranks.run(layer_cases.matrix, 4, request.param, layer_cases.CASES, timeout=400)


@pytest.mark.parametrize("case", layer_cases.CASES, ids=layer_cases.name)
def test_a_layer_gives_the_numbers_of_one_rank(matrix, case):
    layer, records = matrix
    for errors, bitwise in (rank[layer_cases.name(case)] for rank in records):
        assert max(errors.values()) < 1e-5, errors
        if layer_cases.is_bitwise(layer, case):
            assert bitwise, "without TP the output is one rank's to the bit"


def test_token_numbers_come_back_in_place():
    assert ranks.run(layer_cases.round_trip_of_tokens, 4) == [[]] * 4


def test_a_wrong_order_is_an_error_on_every_rank():
    for said in ranks.run(layer_cases.wrong_orders, 4, timeout=60):
        assert len(said) == 4
        assert all("did not arrive in the declared order" in error for error in said)


SHAPES = {
    "gated_delta_net": LayerShape(width=32, exchanged=4 * (16 + 24 + 4), output=4 * 24),
    "kimi_delta_attention": LayerShape(width=32, exchanged=4 * (16 + 24 + 2), output=4 * 24, bottleneck=6),
}


@pytest.mark.parametrize("layer", layer_cases.LAYERS)
@pytest.mark.parametrize("world_size", [2, 4])
def test_recorded_bytes_are_those_of_the_formulas(layer, world_size):
    B, T, D = 2, layer_cases.LENGTH, layer_cases.WIDTH
    shape = SHAPES[layer]
    seen = 0
    for (exchange, tp, cp, sp), row in ranks.run(layer_cases.traffic, world_size, layer)[0]:
        over_cp = 0
        if cp > 1:
            over_cp = 4 * (
                elements_in(exchange, shape, B * T, cp, tp, sp) + elements_out(shape, B * T, cp, tp)
            )
        assert row["cp forward (bytes)"] == row["cp backward (bytes)"] == over_cp
        # Over TP with sequence parallelism: gather the input, reduce-scatter the output; then the other way.
        rows = B * T if exchange == "all_gather" and cp > 1 else B * T // cp
        # Without an exchange the bottleneck is made of what was gathered.
        narrow = B * T * shape.bottleneck if exchange == "all_to_all" and cp > 1 else 0
        leg, out = 4 * (rows * D + narrow) * (tp - 1) // tp, 4 * B * T // cp * D * (tp - 1) // tp
        if sp:
            assert row["tp forward (bytes)"] == row["tp backward (bytes)"] == leg + out
        else:  # all-reduces: of the output forward, of the input's gradient backward
            assert row["tp forward (bytes)"] == row["tp backward (bytes)"] == (2 * out if tp > 1 else 0)
        seen += cp > 1
    assert seen >= 2, "nothing crossed"


def test_the_published_shapes_send_the_published_elements():
    qwen3_next = LayerShape(width=2048, exchanged=16 * (2 * 128 + 2 * 128 + 4), output=4096)
    assert qwen3_next.exchanged + qwen3_next.output == 12352
    published = qwen3_next.exchanged + 2 * qwen3_next.output  # z crosses too
    assert published == 16448


def test_published_widths_of_kda_give_the_published_ratio():
    """GLM-5.3-Flash, D 4096 and 64 heads of 128, at CP 2: all-to-all over all-gather, in, and in and out."""

    def ratios(exchanged, bottleneck=0):
        shape = LayerShape(width=4096, exchanged=exchanged, output=64 * 128, bottleneck=bottleneck)
        ways = [elements_in(name, shape, 1024, 2, 1, False) for name in ("all_to_all", "all_gather")]
        out = elements_out(shape, 1024, 2, 1)
        return ways[0] / ways[1], (ways[0] + out) / (ways[1] + out)

    everything = 64 * (3 * 128 + 2 * 128) + 64  # q, k, the decay gate, v, the output gate, beta
    assert ratios(everything) == pytest.approx((5.0, 3.0), abs=0.01)
    ours = 64 * (2 * 128 + 128) + 64  # both gates stay, but for the bottleneck of one
    assert ratios(ours, bottleneck=128) == pytest.approx((3.04, 2.02), abs=0.01)


@pytest.mark.parametrize(
    ("cp", "tp", "sp", "expected"),
    [
        (2, 1, True, "all_gather"),
        (2, 8, True, "all_gather"),
        (2, 8, False, "all_to_all"),
        (3, 8, True, "all_to_all"),
        (3, 1, True, "all_gather"),
        (4, 1, True, "all_to_all"),
        (8, 1, True, "all_to_all"),
    ],
)
def test_auto_takes_the_fewer_elements_with_the_margins_of_the_formula(cp, tp, sp, expected):
    assert choose(LayerShape(width=2048, exchanged=8256, output=4096), cp, tp, sp)[0] == expected


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


@pytest.mark.parametrize("order", ["headtail", "none"])
@pytest.mark.parametrize("exchange", ["all_to_all", "all_gather"])
@pytest.mark.parametrize("mesh", MESHES)
def test_the_model_trains_as_on_one_rank(run, one_rank, mesh, exchange, order):
    compare(run, one_rank, MESHES[mesh], exchange, order, "spmd_types")


@pytest.mark.parametrize(
    ("mesh", "exchange", "order"),
    [
        ("cp 2", "all_gather", "none"),
        ("cp 2, tp 2", "all_gather", "headtail"),
        ("cp 2, tp 2", "all_to_all", "headtail"),
    ],
)
def test_the_other_backend_trains_alike(run, one_rank, mesh, exchange, order):
    compare(run, one_rank, MESHES[mesh], exchange, order, "partial_dtensor")


def compare(run, one_rank, mesh, exchange, order, backend):
    world_size, *argv = mesh
    argv += ["--linear_attention.exchange", exchange, "--parallelism.context_parallel_load_balancer", order]
    records = run(world_size, *argv, "--parallelism.spmd_backend", backend)
    assert_same_numbers(records, one_rank)


@pytest.mark.parametrize("exchange", ["all_to_all", "all_gather"])
@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
def test_a_block_works_in_a_plain_program_and_compiles_without_a_graph_break(exchange, backend):
    errors = ranks.run(outside_trainer.block_on_a_mesh, 2, exchange, backend, timeout=280)
    assert max(errors) < 1e-5


@pytest.mark.parametrize("exchange", ["all_to_all", "all_gather"])
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
        model = qwen3_next(**overrides).build()
        model.init_states()
        transfers.clear()
        Reads.scalars = 0
        with Reads():
            model(torch.randint(0, 264, (2, 64)), torch.arange(64).expand(2, 64))
        assert transfers == [(128,)]
        assert Reads.scalars == 1  # where the offsets are, of the copy on the host


def refused(*argv, world_size=4, **overrides):
    argv = [f"--model.overrides.{key}={value}" for key, value in overrides.items()] + list(argv)
    path = os.path.join(os.path.dirname(__file__), "..", "train_configs", "qwen3_next_debug.toml")
    with pytest.raises(ConfigError) as error:
        load_config(["--job.config_file", path, *argv], world_size)
    return str(error.value)


def test_heads_that_do_not_divide_are_refused_with_the_three_numbers():
    said = refused(CP, "2", TP, "4", world_size=8)
    assert (
        "4 key heads" in said
        and "tensor_parallel_degree = 4" in said
        and "context_parallel_degree = 2" in said
    )


def test_lengths_that_do_not_divide_are_refused_with_what_divides_them():
    assert "2 * context_parallel_degree = 8" in refused(CP, "4", "--training.seq_len", "500")
    said = refused(CP, "2", TP, "2", "--training.seq_len", "500", "--training.local_batch_size", "1")
    assert "2 * context_parallel_degree = 4 times tensor_parallel_degree = 2" in said


def test_flex_attention_wants_whole_blocks(monkeypatch):
    from titan_gdn.layers.gated_attention import DocumentFlexAttention
    from titan_gdn.models import qwen3_next as package

    monkeypatch.setattr(package, "device_type", "cuda")
    assert isinstance(
        package.flavors["debug"]().first_attention.inner_attention, DocumentFlexAttention.Config
    )
    assert "128 * context_parallel_degree = 256" in refused(
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
        "n_experts": 8,
        "n_experts_per_token": 2,
        "expert_hidden_dim": 64,
        "shared_expert_hidden_dim": 64,
    }
    assert len(dry_run(path, tmp_path, *local, **small)["loss"]) == 1
