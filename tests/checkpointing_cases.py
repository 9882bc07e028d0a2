"""Trains a model in one mode of activation checkpointing after the other, on every rank of a pool."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed._tools.mem_tracker import MemTracker

from titan_gdn.bench.recorder import BytesSent

BATCH, LENGTH = 2, 256
RAGGED = [0, 1, 3, 66, 127, 130, 200, 256]
SMALL = {
    "dim": 64,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "hidden_dim": 96,
}


def train_modes(family, cases):
    """Train two steps for each of `cases`, which are lists of command-line arguments, and return the records.

    A record holds the losses and gradient norms of both steps, the number of collectives over CP in the first
    step, and the peak memory of the second step in bytes. Compiled cases count the collectives of both steps
    and have no peak, because nothing is compiled under the memory tracker.
    """
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.utils import set_spmd_backend

    dist.init_process_group("gloo")
    torch.autograd.set_multithreading_enabled(False)
    set_spmd_backend("spmd_types")
    cp = dist.get_world_size()
    dims = ParallelDims(
        dp_replicate=1, dp_shard=1, cp=cp, tp=1, pp=1, ep=1, world_size=cp, spmd_backend="spmd_types"
    )
    dims.build_mesh()
    records = []
    for words in cases:
        torch._dynamo.reset()
        with torch._functorch.config.patch(activation_memory_budget=1.0):  # a policy sets it for good
            records.append(_train(family, words, dims))
    return records


class Sent(BytesSent):
    """Counts collectives and, unlike its base class, does not prevent compilation."""

    @classmethod
    def ignore_compile_internals(cls):
        return True


class Memory(MemTracker):
    """Counts gradients as temporary: the tracker's hooks on them fail for slices of parameters."""

    def _track_module_params_and_buffers(self, module, install_grad_hooks=True):
        return super()._track_module_params_and_buffers(module, install_grad_hooks=False)


def _train(family, words, dims):
    model, positions, tokens, labels = _prepare(family, words, dims)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sent, memory, compiled = Sent(), Memory(), "--compile.enable" in words
    memory.track_external(model)
    record = {"loss": [], "norms": []}
    for watch in (sent, memory):
        with sent if compiled else watch:
            loss = F.cross_entropy(model(tokens, positions).flatten(0, 1), labels.flatten())
            loss.backward()
        record["loss"].append(loss.item())
        norms = [parameter.grad.to_local().double().norm() for parameter in model.parameters()]
        record["norms"].append(torch.stack(norms).tolist())
        optimizer.step()
        optimizer.zero_grad()
    record["calls"] = sent.calls[dims.get_mesh("cp").get_group().group_name]
    if not compiled:
        record["peak"] = memory.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    return record


def _prepare(family, words, dims):
    """Build and parallelize the model of a case. Return it and this rank's shard of a batch."""
    from titan_gdn.config.load import load_config
    from titan_gdn.parallel.segments import shard_order

    path = os.path.join(os.path.dirname(__file__), "..", "train_configs", f"{family}_debug.toml")
    small = [word for key, value in SMALL.items() for word in (f"--model.overrides.{key}", str(value))]
    small += ["--training.seq_len", str(LENGTH), "--training.local_batch_size", str(BATCH)]
    cp = ["--parallelism.context_parallel_degree", str(dims.cp)]
    config = load_config(["--job.config_file", path, *small, *cp, *words], dims.world_size)
    spec = config.model_spec
    spec.model.update_from_config(config=config)
    with torch.device("meta"):
        model = spec.model.build()
    model = spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=config.training,
        parallelism=config.parallelism,
        compile_config=config.compile,
        ac_config=config.activation_checkpoint,
        dump_folder=config.dump_folder,
    )
    torch.manual_seed(0)
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    starts = torch.tensor(RAGGED)
    positions = torch.cat([torch.arange(n) for n in starts.diff().tolist()]).expand(BATCH, -1)
    torch.manual_seed(1)
    tokens = torch.randint(0, spec.model.vocab_size, (BATCH, LENGTH))
    mine = shard_order(LENGTH, dims.cp, "headtail").view(dims.cp, -1)[dims.get_mesh("cp").get_local_rank()]
    return model, positions[:, mine], tokens[:, mine], tokens.roll(-1, 1)[:, mine]
