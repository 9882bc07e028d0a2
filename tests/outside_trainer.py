"""Runs a block in a plain PyTorch program: `init_device_mesh`, `fully_shard`, `torch.compile`, no trainer.

docs/without_the_trainer.md shows the same lines.
"""

import copy

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.compare import relative_error
from tests.layer_cases import LENGTH, positions_of


class Model(torch.nn.Module):
    """Shard the decay parameters as a unit of their own, which the root calls before the blocks."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x, sequence):
        return self.block(x, None, None, self.block.linear_attention.decay(), sequence=sequence)


def block_on_a_mesh(exchange, backend):
    """Return the relative errors of outputs and gradients in three steps, compared with one rank."""
    from titan_gdn.layers.linear_attention import LinearAttentionConfig
    from titan_gdn.models.qwen3_next import Qwen3NextArguments
    from titan_gdn.parallel.segments import shard_order
    from titan_gdn.parallel.sequence import ContextParallel, SequenceLayout

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    config = Qwen3NextArguments(
        dim=64, n_layers=1, n_experts=0, hidden_dim=96, n_linear_key_heads=4, n_linear_value_heads=8
    ).config()
    block_config = config.layers[0]
    block_config.linear_attention.run = LinearAttentionConfig(exchange=exchange)
    torch.manual_seed(0)
    block = block_config.build()
    block.init_states()
    whole, model = Model(copy.deepcopy(block)), Model(block)

    block.linear_attention.split_sequence(cp_mesh=mesh, tp_mesh=None)
    if backend is not None:
        block.compile(fullgraph=True, backend=backend)
    units = [block.linear_attention.decay, block, model]
    for unit in units:
        fully_shard(unit, mesh=mesh)
    for unit in units:
        unit.set_gradient_divide_factor(1.0)  # the ranks' tokens add up to one batch
        unit.set_force_sum_reduction_for_comms(True)  # gloo has no other

    mine = shard_order(LENGTH, 2, "headtail").view(2, -1)[mesh.get_local_rank()]
    positions = positions_of("ragged")
    found = []
    for _ in range(3):
        x = torch.randn(1, LENGTH, 64)
        model.zero_grad()
        whole.zero_grad()
        expected = whole(x, SequenceLayout.from_positions(positions))
        expected.square().sum().backward()
        sequence = SequenceLayout.from_positions(
            positions[:, mine], ContextParallel(mesh, "headtail", agreement_mesh=mesh)
        )
        out = model(x[:, mine], sequence)
        out.square().sum().backward()
        found.append(relative_error(out, expected[:, mine]))
        for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
            found.append(relative_error(ours.grad.full_tensor(), theirs.grad))
    return max(found)
