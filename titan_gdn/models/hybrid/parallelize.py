"""Applies parallelism, activation checkpointing and compilation to a hybrid model."""

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torchtitan.config import TORCH_DTYPE_MAP, CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointingConfig
from torchtitan.distributed.compile import apply_compile
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
from torchtitan.distributed.full_dtensor import resolve_fsdp_mesh, resolve_sparse_fsdp_mesh

from titan_gdn.models.hybrid.mtp import mtp_of
from titan_gdn.parallel.segments import Order
from titan_gdn.parallel.sequence import ContextParallel
from titan_gdn.runtime.async_wait import keep_gradients

if TYPE_CHECKING:
    from titan_gdn.models.hybrid.model import HybridModel


def parallelize_hybrid(
    model: "HybridModel",
    *,
    parallel_dims: ParallelDims,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
    compile_config: CompileConfig,
    ac_config: ActivationCheckpointingConfig,
    dump_folder: str,
) -> "HybridModel":
    """Applies CP, TP, EP, activation checkpointing, compilation and FSDP2, in this order.

    TorchTitan's trainer calls this as `ModelSpec.parallelize_fn`.

    Args:
        model: the model, or the part of a pipeline stage, on the meta device. Changed in place.
        parallel_dims: the device mesh.
        training: dtypes of mixed precision, and CPU offload.
        parallelism: degrees and SPMD backend.
        compile_config: whether blocks are compiled, and how.
        ac_config: the policy of activation checkpointing, None for no checkpointing.
        dump_folder: folder for the output of activation checkpointing.

    Returns:
        `model`.
    """
    split_context(model, parallel_dims, parallelism)
    if parallelism.spmd_backend == "partial_dtensor":
        keep_gradients()
    if parallelism.spmd_backend == "spmd_types" or parallel_dims.tp_enabled or parallel_dims.ep_enabled:
        model.parallelize(parallel_dims)
    decoders: list[Any] = [*mtp_of(model), model]
    for part in decoders:
        if ac_config is not None:
            ac_config.build(dump_folder=dump_folder).apply(part)
        if compile_config.enable and "model" in compile_config.components:
            apply_compile(part, compile_config=compile_config, parallel_dims=parallel_dims)

    if parallelism.spmd_backend == "spmd_types":
        mesh, mesh_dims = resolve_fsdp_mesh(parallel_dims)
        expert_mesh, expert_mesh_dims = resolve_sparse_fsdp_mesh(parallel_dims)
    else:
        replicate = ["dp_replicate"] if parallel_dims.dp_replicate_enabled else []
        mesh, mesh_dims = parallel_dims.get_mesh([*replicate, "fsdp"]), None
        expert_mesh, expert_mesh_dims = parallel_dims.get_optional_mesh([*replicate, "efsdp"]), None
    reduce_dtype = TORCH_DTYPE_MAP[training.mixed_precision_reduce]
    decays: list[nn.Module] = list(model.decays())
    if decays:
        options: dict[str, Any] = {} if mesh_dims is None else {"dp_mesh_dims": mesh_dims}
        if training.enable_cpu_offload:
            options["offload_policy"] = CPUOffloadPolicy()
        # The decays of all layers form one float32 unit, which is called before the blocks. In the units of
        # the blocks, `param_dtype` would round them, and a nested unit would break the graph of its block.
        # The unit is small, so it is never resharded.
        fully_shard(
            decays,
            mesh=mesh,
            reshard_after_forward=False,
            mp_policy=MixedPrecisionPolicy(
                param_dtype=torch.float32, reduce_dtype=reduce_dtype, cast_forward_inputs=False
            ),
            **options,
        )
    for part in decoders:
        apply_fsdp_to_decoder(
            part,
            mesh,
            param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
            reduce_dtype=reduce_dtype,
            pp_enabled=parallel_dims.pp_enabled,
            cpu_offload=training.enable_cpu_offload,
            reshard_after_forward_policy=parallelism.fsdp_reshard_after_forward,
            ep_degree=parallel_dims.ep,
            edp_mesh=expert_mesh,
            dp_mesh_dims=mesh_dims,
            edp_mesh_dims=expert_mesh_dims,
            enable_symm_mem=parallelism.enable_fsdp_symm_mem,
        )
    if mesh.device_type == "cpu":
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # FSDP otherwise reduces with a factor, which gloo does not support.
                module.set_force_sum_reduction_for_comms(True)
    return model


def split_context(model: "HybridModel", parallel_dims: ParallelDims, parallelism: ParallelismConfig) -> None:
    """Sets the sub-meshes over which the model and its layers shard sequences."""
    cp_mesh = parallel_dims.get_optional_mesh("cp")
    tp_mesh = parallel_dims.get_optional_mesh("tp") if parallelism.enable_sequence_parallel else None
    if cp_mesh is not None:
        order = cast(Order, parallelism.context_parallel_load_balancer or "contiguous")
        model.context_parallel = ContextParallel(
            cp_mesh, order, agreement_mesh=parallel_dims.get_mesh("loss")
        )
    layers: Any = [layer for part in (model, *mtp_of(model)) for layer in part.layers.values()]
    for layer in layers:
        (layer.linear_attention or layer.attention).split_sequence(cp_mesh, tp_mesh)
