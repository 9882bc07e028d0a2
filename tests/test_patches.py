"""Every patch of a library (`titan_gdn/runtime/`) is still needed: the library without it fails.

A failure here is good news: the installed version does without the patch that the message names.
"""

import importlib.util
import inspect
import logging
import subprocess
import sys
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from tests import ranks
from titan_gdn.runtime import cpu

no_gpu = pytest.mark.skipif(torch.accelerator.is_available(), reason="the patch is for machines without one")


def not_needed(patch: str) -> str:
    return f"torch {torch.__version__} no longer needs titan_gdn/runtime/{patch}: delete it"


# --- On two ranks, with torch as it is ---


def unpatched() -> dict[str, object]:
    """What torch does without the patches, on one of two ranks."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed.tensor import _collective_utils
    from torch.distributed.tensor.debug import CommDebugMode

    from titan_gdn.runtime import async_wait, gloo

    assert AsyncCollectiveTensor.wait is not async_wait._wait
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    with CommDebugMode() as collectives:
        _collective_utils.shard_dim_alltoall(torch.ones(2, 2), 0, 1, mesh, 0)
    return {
        "gradient": gathered(mesh).wait().requires_grad,
        "collectives": {str(kind) for kind in collectives.get_comm_counts()},
        "uneven": error_of(exchange_uneven, gloo._all_to_all),
        "sizes": error_of(compile_with_budget, mesh),
    }


def patched() -> dict[str, object]:
    """The same with the patches."""
    from torch.distributed.tensor import placement_types

    from titan_gdn.runtime import async_wait, gloo, partitioner

    gloo.patch()
    async_wait.keep_gradients()
    partitioner.ignore_process_groups()
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    x = torch.arange(4.0).view(2, 2) + 10 * mesh.get_rank()
    return {
        "gradient": gathered(mesh).wait().requires_grad,
        "column": placement_types.shard_dim_alltoall(x, 0, 1, mesh, 0).flatten().tolist(),
        "uneven": error_of(exchange_uneven, dist.all_to_all),
        "sizes": error_of(compile_with_budget, mesh),
    }


def gathered(mesh):
    """A tensor that is being gathered, as TorchTitan hands it to a `local_map` region."""
    x = torch.ones(1, 4, 8, requires_grad=True)
    sharded = DTensor.from_local(x, mesh, [Shard(1)], run_check=False)
    return sharded.redistribute(placements=[Replicate()], async_op=True).to_local()


def exchange_uneven(all_to_all):
    """Rank 0 sends 1 and 2 numbers, rank 1 sends 2 and 3."""
    rank, counts = dist.get_rank(), ((1, 2), (2, 3))
    inputs = [torch.full((count,), 10.0 * rank) for count in counts[rank]]
    outputs = [torch.empty(counts[source][rank]) for source in range(2)]
    all_to_all(outputs, inputs)
    assert [set(output.tolist()) for output in outputs] == [{0.0}, {10.0}]


def compile_with_budget(mesh):
    def layer(x, mesh):
        y = DTensor.from_local(x @ weight, mesh, [Shard(0)], run_check=False)
        return (y.redistribute(placements=[Replicate()]).to_local().sin() @ weight).sin()

    weight, x = torch.randn(8, 8, requires_grad=True), torch.randn(4, 8, requires_grad=True)
    with torch._functorch.config.patch(activation_memory_budget=0.3):
        torch.compile(layer, backend="aot_eager")(x, mesh).sum().backward()


def error_of(function, *args) -> str | None:
    try:
        function(*args)
    except Exception as error:
        return str(error)
    return None


@pytest.fixture(scope="module")
def torchs_own():
    return ranks.run(unpatched, 2)


@pytest.fixture(scope="module")
def ours():
    return ranks.run(patched, 2)


def test_waiting_for_a_collective_drops_the_gradient(torchs_own, ours):
    for before, after in zip(torchs_own, ours, strict=True):
        assert not before["gradient"], not_needed("async_wait.py")
        assert after["gradient"]


@no_gpu
def test_gloo_refuses_parts_of_different_sizes(torchs_own, ours):
    for before, after in zip(torchs_own, ours, strict=True):
        assert "invalid tensor size" in str(before["uneven"]), not_needed("gloo.py::all_to_all")
        assert after["uneven"] is None


@no_gpu
def test_dtensor_gathers_on_a_cpu_where_it_could_exchange(torchs_own, ours):
    for rank, (before, after) in enumerate(zip(torchs_own, ours, strict=True)):
        gathers = {"c10d_functional.all_gather_into_tensor"}
        assert before["collectives"] == gathers, not_needed("gloo.py::shard_dim_alltoall")
        assert after["column"] == [0 + rank, 2 + rank, 10 + rank, 12 + rank]


def test_the_partitioner_asks_for_the_size_of_a_process_group(torchs_own, ours):
    for before, after in zip(torchs_own, ours, strict=True):
        assert "Cannot compute the size" in str(before["sizes"]), not_needed("partitioner.py")
        assert after["sizes"] is None


# --- The CPU as TorchTitan's device ---


@pytest.fixture(scope="module")
def torchtitans_utils():
    """A second copy of `torchtitan.tools.utils`, without the patch."""
    spec = importlib.util.find_spec("torchtitan.tools.utils")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@no_gpu
def test_torchtitan_takes_cuda_where_there_is_no_accelerator(torchtitans_utils):
    from torchtitan.tools import utils

    assert torchtitans_utils.device_type == "cuda", not_needed("cpu.py::enable")
    assert utils.device_type == "cpu"


@no_gpu
def test_torchtitan_takes_a_cpu_for_an_a100(torchtitans_utils):
    from torchtitan.tools import utils

    assert torchtitans_utils.get_peak_flops("cpu") == 312e12, not_needed("cpu.py::measure_peak_flops")
    assert utils.get_peak_flops("cpu") < 312e12


@pytest.mark.parametrize("name", [name for name in vars(cpu._CPU) if not name.startswith("__")])
def test_torch_cpu_lacks_a_function_of_torch_cuda(name):
    theirs = getattr(torch.cpu, name, None)
    usable = theirs is not None and (name != "current_device" or theirs() == 0)  # TorchTitan wants an index
    assert not usable, not_needed(f"cpu.py::_CPU.{name}")


# --- Log lines and warnings ---


def test_torch_logs_how_torchao_registers_its_enums():
    command = [sys.executable, "-c", "import torchao.quantization"]
    logged = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert "torch/utils/_pytree.py" in logged, not_needed("silence.py (torch.utils._pytree)")


def test_torchdata_warns_of_its_own_call():
    from torchdata.stateful_dataloader import StatefulDataLoader

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        StatefulDataLoader([1])
    assert any("set_vital" in str(warning.message) for warning in caught), not_needed("silence.py (warnings)")


def test_dtensor_recommends_another_mesh(caplog, monkeypatch):
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    monkeypatch.setattr(logger, "level", logging.NOTSET)
    monkeypatch.setattr(logger, "propagate", True)
    dist.init_process_group("fake", rank=0, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        x = DTensor.from_local(torch.ones(4), mesh, [Partial(), Partial()], run_check=False)
        logger.addHandler(caplog.handler)
        x.redistribute(placements=[Replicate(), Replicate()])
    finally:
        logger.removeHandler(caplog.handler)
        dist.destroy_process_group()
    assert "This is suboptimal" in caplog.text, not_needed(
        "silence.py (torch.distributed.tensor._redistribute)"
    )


# --- Private names of TorchTitan that this project overrides or calls ---


def test_torchtitans_selective_checkpointing_knows_operators_but_no_groups():
    from torchtitan.distributed.activation_checkpoint import SelectiveAC

    from titan_gdn.models.hybrid import activation_checkpoint

    assert list(inspect.signature(SelectiveAC.get_save_ops).parameters) == ["self"], (
        "TorchTitan's policy sees more than operators: "
        "titan_gdn/models/hybrid/activation_checkpoint.py may no longer need to override _wrap_block"
    )
    theirs, own = SelectiveAC._wrap_block, activation_checkpoint.SelectiveAC._wrap_block
    assert inspect.signature(theirs) == inspect.signature(own), "TorchTitan no longer calls our override"
    wrapped = (
        SelectiveAC.Config().build(dump_folder="")._wrap_block(torch.nn.Linear(2, 2), base_fqn="layers.0")
    )
    assert callable(wrapped.checkpoint_fn.keywords["context_fn"])


def test_torchtitan_tells_only_privately_which_rank_logs_metrics():
    from torchtitan.components import metrics

    assert "get_metrics_rank" not in vars(metrics), (
        "TorchTitan has a public get_metrics_rank: call it in train.py"
    )
    assert list(inspect.signature(metrics._get_metrics_rank).parameters) == ["parallel_dims", "pp_schedule"]
