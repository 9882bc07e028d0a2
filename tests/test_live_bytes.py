"""How many bytes of tensors are alive while weights are loaded and converted."""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from tests import hf, live_bytes, ranks
from tests.training import _built
from titan_gdn import convert


def test_allocated_and_freed_bytes_are_counted_and_mapped_files_are_not(tmp_path):
    save_file({"x": torch.ones(5000)}, tmp_path / "x.safetensors")
    with live_bytes.recorded() as peak, safe_open(tmp_path / "x.safetensors", "pt") as file:
        x = file.get_tensor("x")[:1000] + 1
        for _ in range(3):
            y = x + 1
            del y
    assert 8000 <= peak[0] < 9000


def bytes_of(tensors):
    """The bytes of the storages of tensors on this rank."""
    local = [x.to_local() if isinstance(x, DTensor) else x for x in tensors]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in local}.values())


def load(argv):
    """Load as the trainer does; return the bytes alive at most, and the float32 size of the whole model."""
    trainer = _built(argv)
    parts = trainer.model_parts
    tensors = [x for part in parts for x in (*part.parameters(), *part.buffers())]
    with live_bytes.recorded() as peak:
        assert trainer.checkpointer.load()
    trainer.close()
    whole = sum(4 * x.numel() for part in parts for x in part.parameters())
    return bytes_of(tensors) + peak[0], whole


@pytest.mark.parametrize("family", ["qwen3_next", "kimi_linear"])
@pytest.mark.parametrize("mesh", ["data_parallel_shard", "tensor_parallel"])
def test_a_rank_never_holds_much_more_than_its_shards(family, mesh, tmp_path):
    """Rows in the files are in another order than the model's, so a shard has rows from many places."""
    theirs, overrides = hf.model(family)
    theirs.save_pretrained(tmp_path / "source")
    checkpoint = hf.weights_of(tmp_path / "source")
    path = hf.toml(str(tmp_path), overrides, model={"name": family}, checkpoint=checkpoint)
    told = ranks.run(load, 2, ["--job.config_file", path, f"--parallelism.{mesh}_degree", "2"])
    for alive, whole in told:
        assert alive < 0.7 * whole


@pytest.mark.parametrize("family", ["qwen3_next", "kimi_linear"])
def test_a_conversion_never_holds_the_model(family, tmp_path):
    """Neither a model directory nor a step, of which it makes the other."""
    theirs, overrides = hf.model(family)
    theirs.save_pretrained(tmp_path / "source")
    argv = ["--job.config_file", hf.toml(str(tmp_path), overrides, model={"name": family})]
    whole = 4 * sum(x.numel() for x in theirs.parameters())
    for source, target in (("source", "step"), ("step", "folder")):
        with live_bytes.recorded() as peak:
            convert.main([str(tmp_path / source), str(tmp_path / target), *argv])
        assert peak[0] < 0.35 * whole, target
