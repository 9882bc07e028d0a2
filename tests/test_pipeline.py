"""Pipeline stages: each with its own layers, layout and decays, and together the numbers of one rank."""

import pytest

from tests import hf, ranks
from tests.training import assert_same_numbers, train

PP, CP, TP = (f"--parallelism.{name}_parallel_degree" for name in ("pipeline", "context", "tensor"))
INTERLEAVED = ("--parallelism.pipeline_parallel_schedule", "Interleaved1F1B")
GATHER, EXCHANGE, STATE = (("--linear_attention.exchange", e) for e in ("all_gather", "all_to_all", "state"))

# Four stages of four layers: with the embedding, of one, of two, and with the head alone.
LAYERS = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
}
SPARSE = {
    "qwen3_next": {"mlp_only_layers": [0, 2]},
    "kimi_linear": {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
}


@pytest.fixture(scope="module", params=["qwen3_next", "kimi_linear"])
def family(request, tmp_path_factory):
    """Trains 3 steps of a model on some ranks, and what one rank had."""
    folder = str(tmp_path_factory.mktemp(request.param))
    model, overrides = hf.model(request.param, **LAYERS | SPARSE[request.param])
    model.save_pretrained(folder)
    path = hf.toml(
        folder,
        overrides,
        model={"name": request.param},
        checkpoint=hf.weights_of(folder),
        # Micro-batches change the order of sums. At a higher rate Adam makes enough of that in three steps
        # for a router to choose another expert.
        optimizer={"lr": 3e-4},
    )

    def run(world_size, *argv):
        return ranks.run(train, world_size, ["--job.config_file", path, *argv], timeout=280)

    one_rank = run(1)[0]
    assert one_rank["gap"] > 1e-6, "a near tie between experts: take another seed"
    return run, one_rank


MESHES = {
    "pp 2, cp 2": (4, CP, "2", *GATHER),
    "pp 2, cp 2, interleaved": (4, CP, "2", *EXCHANGE, *INTERLEAVED),
    "pp 2, tp 2": (4, TP, "2"),
    "pp 2, tp 2, interleaved": (4, TP, "2", *INTERLEAVED),
    "pp 2, cp 2, tp 2": (8, CP, "2", TP, "2", *STATE),
    "pp 2, cp 2, tp 2, interleaved": (8, CP, "2", TP, "2", *EXCHANGE, *INTERLEAVED),
}


@pytest.mark.parametrize("mesh", MESHES)
def test_a_pipeline_trains_as_one_rank(family, mesh):
    run, one_rank = family
    world_size, *argv = MESHES[mesh]
    assert_same_numbers(run(world_size, PP, "2", *argv), one_rank)
