"""The shim that TorchTitan needs without an accelerator, and the runs that meshes are compared by."""

import pytest
import torch

from titan_gdn.runtime import cpu

# Before TorchTitan is imported, by tests as by the command.
cpu.enable()
torch.set_num_threads(1)

from tests import hf, ranks  # noqa: E402
from tests.training import train  # noqa: E402

# Two layers are enough to hold one of each kind; every parameter more costs each rank time in DTensor.
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
    """Trains 3 steps on some ranks with some changes to the command line."""
    folder = str(tmp_path_factory.mktemp("meshes"))
    model, overrides = hf.model(**LAYERS)
    model.save_pretrained(folder)
    path = hf.toml(folder, overrides, checkpoint=hf.weights_of(folder))
    return lambda world_size, *argv: ranks.run(train, world_size, ["--job.config_file", path, *argv])


@pytest.fixture(scope="session")
def one_rank(run):
    """The reference, and that no router has to choose between experts whose scores are nearly equal."""
    record = run(1)[0]
    if record["gap"] is not None:
        assert record["gap"] > 1e-6, (
            "a near tie between experts: meshes may choose differently, take another seed"
        )
    return record
