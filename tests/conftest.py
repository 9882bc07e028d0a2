"""The sets of tests (fast, slow, nightly) and the training runs that several test files compare."""

import pytest
import torch

from titan_gdn.runtime import cpu

# TorchTitan must find the CPU backend when it is imported.
cpu.enable()
torch.set_num_threads(1)

from tests import hf, ranks  # noqa: E402
from tests.training import train  # noqa: E402

# Two layers hold one of each kind. Every further parameter costs each rank time in DTensor.
LAYERS = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "mlp_only_layers": [0],  # the first dense, the second with experts
}


def pytest_addoption(parser):
    """Plain `pytest` runs the fast set; the markers are explained in pyproject.toml."""
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")
    parser.addoption("--nightly", action="store_true", help="run all tests")


def pytest_collection_modifyitems(config, items):
    """Leave out the sets that were not asked for."""
    left_out = set() if config.getoption("nightly") else {"nightly"}
    if not (config.getoption("slow") or config.getoption("nightly")):
        left_out.add("slow")
    dropped = [item for item in items if any(item.get_closest_marker(mark) for mark in left_out)]
    config.hook.pytest_deselected(items=dropped)
    items[:] = [item for item in items if item not in set(dropped)]


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """Return a function that trains 3 steps on some ranks, with some arguments on the command line."""
    folder = str(tmp_path_factory.mktemp("meshes"))
    model, overrides = hf.model(**LAYERS)
    model.save_pretrained(folder)
    path = hf.toml(folder, overrides, checkpoint=hf.weights_of(folder))
    return lambda world_size, *argv: ranks.run(train, world_size, ["--job.config_file", path, *argv])


@pytest.fixture(scope="session")
def one_rank(run):
    """The run on one rank that others must equal. Checks that no router meets experts with equal scores."""
    record = run(1)[0]
    if record["gap"] is not None:
        assert record["gap"] > 1e-6, (
            "the scores of two experts are nearly equal, so meshes may choose differently: change the seed"
        )
    return record
