"""A linear attention layer on N ranks: bytes sent over each group, time and memory for each exchange.

Bytes are recorded from the collectives that run and are printed beside those of the formula.
"""

import importlib
import json
import multiprocessing
import os
import resource
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.tools.utils import device_module, device_type

from titan_gdn.bench.options import LayerOptions
from titan_gdn.bench.recorder import BytesSent
from titan_gdn.display.tables import cell, console, print_table
from titan_gdn.layers.linear_attention import LinearAttention, LinearAttentionConfig, Widths
from titan_gdn.parallel.exchange.base import Exchange
from titan_gdn.parallel.exchange.registry import impossible, traffic
from titan_gdn.parallel.segments import shard_order
from titan_gdn.parallel.sequence import ContextParallel, SequenceLayout
from titan_gdn.parallel.traffic import LayerShape, ShardedBatch


def find_layer(name: str) -> type[LinearAttention]:
    """The linear attention layer that a module defines.

    Args:
        name: a module of `titan_gdn.layers`, or the dotted name of any other module.

    Raises:
        ValueError: there is no such module, or it defines no layer, or several.
    """
    path = name if "." in name else f"titan_gdn.layers.{name}"
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"--layer {name}: {error}. Expected a module of titan_gdn.layers, such as gated_delta_net, or "
            "the dotted name of another module"
        ) from error
    layers = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__ == path and issubclass(value, LinearAttention)
    ]
    if len(layers) != 1 or not hasattr(layers[0], "rule"):
        raise ValueError(f"--layer {name}: expected one linear attention layer in {path}, not {len(layers)}")
    return layers[0]


def layer_config(options: LayerOptions, exchange: str) -> LinearAttention.Config:
    """The configuration of the layer with an exchange."""
    config = find_layer(options.layer).configure(
        Widths(
            dim=options.dim,
            key_heads=options.key_heads,
            value_heads=options.value_heads,
            key_dim=options.key_dim,
            value_dim=options.value_dim,
            gate_rank=options.gate_rank,
        )
    )
    config.run = LinearAttentionConfig(kernel=options.kernel, exchange=exchange, regather=options.regather)
    return config


def batch_of(options: LayerOptions) -> ShardedBatch:
    """The batch and how it is sharded, for the traffic model."""
    return ShardedBatch(
        options.batch,
        options.tokens,
        options.cp,
        options.tp,
        options.sequence_parallel,
        options.order,
        getattr(torch, options.dtype).itemsize,
        options.regather,
    )


def build(
    options: LayerOptions,
    exchange: str,
    parallel_dims: ParallelDims,
    weights: dict[str, torch.Tensor] | None = None,
) -> tuple[LinearAttention, LayerShape]:
    """The layer, sharded over the mesh of `parallel_dims` (backend "partial_dtensor"), and its shape."""
    config = layer_config(options, exchange)
    sharded = options.sequence_parallel and options.tp > 1
    config.set_sharding(tp=options.tp, enable_sp=sharded)
    with torch.device(device_type):
        layer = config.build()
    layer.init_states()
    for name, parameter in layer.named_parameters():
        if "decay" not in name:
            parameter.data = parameter.data.to(getattr(torch, options.dtype))
    if weights is not None:
        layer.load_state_dict(weights)
    tp_mesh = parallel_dims.get_mesh("tp") if sharded else None
    layer.split_sequence(parallel_dims.get_optional_mesh("cp"), tp_mesh)
    if options.tp > 1:
        layer.parallelize(parallel_dims)
    return layer, config.shape()


class Prepared(NamedTuple):
    """A layer with an exchange, ready to run on this rank.

    Attributes:
        forward: runs the layer on fixed hidden states and returns an output that requires a gradient.
        shape: the widths of the layer.
        batch: the batch and how it is sharded.
    """

    forward: Callable[[], torch.Tensor]
    shape: LayerShape
    batch: ShardedBatch


def mesh_of(options: LayerOptions) -> ParallelDims:
    """The mesh of the ranks that have been started, with its CP and TP sub-meshes."""
    return ParallelDims(
        dp_replicate=1,
        dp_shard=1,
        cp=options.cp,
        tp=options.tp,
        pp=1,
        ep=1,
        world_size=options.cp * options.tp,
        spmd_backend="partial_dtensor",
    )


def prepare(options: LayerOptions, exchange: str, computes: bool, parallel_dims: ParallelDims) -> Prepared:
    """Build the layer, or only its exchange, and a batch with one document per row."""
    layer, shape = build(options, exchange, parallel_dims)
    batch = batch_of(options)
    rows = batch.tokens_between_layers // options.batch
    x = torch.randn(options.batch, rows, options.dim, device=device_type)
    x = x.to(getattr(torch, options.dtype)).requires_grad_()
    context, mine = None, torch.arange(options.tokens)
    if options.cp > 1:
        cp_mesh = parallel_dims.get_mesh("cp")
        context = ContextParallel(cp_mesh, options.order, cp_mesh)
        mine = shard_order(options.tokens, options.cp, options.order).view(options.cp, -1)[
            cp_mesh.get_local_rank()
        ]
    positions = mine.expand(options.batch, -1).to(device_type)
    sequence = SequenceLayout.from_positions(positions, context)

    def whole_layer() -> torch.Tensor:
        out = layer(x, *layer.decay(), sequence=sequence)
        # The output may be an asynchronous collective's result: an operation on it waits.
        return out.to_local() * 1 if isinstance(out, DTensor) else out

    only_exchange = partial(_only_exchange, layer.exchange, shape, options, x, sequence)
    return Prepared(whole_layer if computes else only_exchange, shape, batch)


def run_once(forward: Callable[[], torch.Tensor]) -> tuple[float, float]:
    """Seconds of a forward and of its backward, which all ranks start together."""
    dist.barrier()
    begin = _now()
    out = forward()
    middle = _now()
    out.backward(torch.ones_like(out))
    return middle - begin, _now() - middle


def measure(options: LayerOptions, exchange: str, computes: bool) -> dict[str, Any]:
    """Run the layer, or only its exchange, on this rank and return this rank's figures."""
    parallel_dims = mesh_of(options)
    forward, shape, batch = prepare(options, exchange, computes, parallel_dims)
    with BytesSent() as sent_forward:
        out = forward()
    with BytesSent() as sent_backward:
        out.backward(torch.ones_like(out))
    del out
    times = zip(*(run_once(forward) for _ in range(options.repeats)), strict=True)
    axes = {
        parallel_dims.get_mesh(a).get_group().group_name: a for a in ("cp", "tp") if getattr(options, a) > 1
    }
    formula = traffic(exchange, shape, batch)
    return {
        "exchange": exchange,
        **{
            f"{way} (s)": statistics.median(seconds)
            for way, seconds in zip(("forward", "backward"), times, strict=True)
        },
        "peak memory (MiB)": _peak_memory() / 2**20,
        **{
            f"{axis} {way} (bytes)": sum(sent.bytes[group] for group, name in axes.items() if name == axis)
            for axis in ("cp", "tp")
            for way, sent in (("forward", sent_forward), ("backward", sent_backward))
        },
        "cp forward, formula": formula.forward.cp_bytes,
        "cp backward, formula": formula.backward.cp_bytes,
    }


def _only_exchange(
    exchange: Exchange,
    shape: LayerShape,
    options: LayerOptions,
    x: torch.Tensor,
    sequence: SequenceLayout,
) -> torch.Tensor:
    """Run only the communication. What a layer would compute is replaced by tensors of the right shapes."""
    groups, R, K = options.key_heads // options.tp, options.value_heads // options.key_heads, options.key_dim

    def project(x: torch.Tensor, run: slice) -> torch.Tensor:
        width = shape.exchanged // options.key_heads
        return x[..., None, :1].expand(-1, -1, run.stop - run.start, width).contiguous()

    def project_low_rank(x: torch.Tensor) -> torch.Tensor | None:
        return x[..., : shape.low_rank].contiguous() if shape.low_rank else None

    def convolution(x: torch.Tensor, cu_seqlens: torch.Tensor, cu_seqlens_cpu: torch.Tensor) -> torch.Tensor:
        return x

    def rule(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        initial_state: torch.Tensor | None = None,
        output_final_state: bool = False,
        *,
        cu_seqlens: torch.Tensor,
        cu_seqlens_cpu: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        states = torch.zeros(len(cu_seqlens) - 1, v.shape[2], K, v.shape[3], device=v.device)
        out = v if initial_state is None else v + initial_state.mean()
        return out, states + v.float().mean() if output_final_state else states

    y, low_rank, _ = exchange.to_heads(x, project, project_low_rank, groups, sequence)
    y = y if low_rank is None else y + low_rank.sum(-1)[..., None, None]
    rows = y[..., : 2 * K + R * options.value_dim].flatten(0, 1).unsqueeze(0)
    rows = exchange.convolve(convolution, rows.flatten(2), shape.kernel_size - 1, sequence).view(rows.shape)
    q, k, v = rows.split([K, K, R * options.value_dim], -1)
    v = v.reshape(1, v.shape[1], -1, options.value_dim)
    out = exchange.recur(rule, q, k, v, v[..., 0], v[..., 0], sequence)
    return exchange.to_tokens(out.view(*y.shape[:2], *out.shape[2:]), sequence)


def _now() -> float:
    device_module.synchronize()
    return time.perf_counter()


def _peak_memory() -> int:
    if device_type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _rank(rank: int, port: int, options: LayerOptions, exchange: str, computes: bool, results: Any) -> None:
    world_size = options.cp * options.tp
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    if device_type == "cuda":
        torch.cuda.set_device(rank)
    backend = dist.Backend.default_device_backend_map[device_type]
    dist.init_process_group(backend, rank=rank, world_size=world_size)
    set_spmd_backend("partial_dtensor")
    torch.manual_seed(0)
    figures = measure(options, exchange, computes)
    if rank == 0:
        results.put(figures)
    dist.barrier()
    os._exit(0) if device_type == "cpu" else dist.destroy_process_group()


def run(options: LayerOptions, computes: bool = True) -> list[dict[str, Any]]:
    """Measure each exchange on new ranks, so that memory peaks do not mix; print and return the figures.

    Raises:
        ValueError: an exchange cannot run the layer on these ranks; says why.
    """
    for exchange in options.exchanges:
        if reason := impossible(exchange, layer_config(options, exchange).shape(), batch_of(options)):
            raise ValueError(f"--exchanges {exchange}: {reason}")
    rows = []
    try:
        for exchange in options.exchanges:
            rows.append(_on_ranks(options, exchange, computes))
    finally:  # keeps what was measured before an exchange fails
        if rows:
            _print(options, rows)
        if rows and options.json:
            with open(options.json, "w") as file:
                json.dump({"options": asdict(options), "figures": rows}, file, indent=2)
    return rows


def _on_ranks(options: LayerOptions, exchange: str, computes: bool) -> dict[str, Any]:
    fork = multiprocessing.get_context("fork")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    results = fork.SimpleQueue()
    ranks = [
        fork.Process(target=_rank, args=(rank, port, options, exchange, computes, results))
        for rank in range(options.cp * options.tp)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    if any(process.exitcode for process in ranks):
        raise RuntimeError(f"{exchange}: ranks exited with {[process.exitcode for process in ranks]}")
    return results.get()


def _print(options: LayerOptions, rows: list[dict[str, Any]]) -> None:
    title = find_layer(options.layer).title
    print_table(
        console(),
        f"{title}, {options.tokens:,} tokens, CP {options.cp}, TP {options.tp}, rank 0",
        list(rows[0]),
        [[cell(x) for x in row.values()] for row in rows],
    )
