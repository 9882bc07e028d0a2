"""A linear attention layer on N ranks: what crosses each group, how long it takes, how much memory it needs.

Bytes are recorded from the collectives that run, and stand beside the formula's.
"""

import json
import multiprocessing
import os
import resource
import socket
import statistics
import time
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed.tensor import DTensor
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.tools.utils import device_module, device_type

from titan_gdn.bench.options import LayerOptions
from titan_gdn.bench.recorder import BytesSent
from titan_gdn.layers.linear_attention import LinearAttention, LinearAttentionConfig
from titan_gdn.models.hybrid.sharding import set_linear_attention
from titan_gdn.models.kimi_linear import kimi_linear
from titan_gdn.models.qwen3_next import qwen3_next
from titan_gdn.parallel.exchange import ExchangeName
from titan_gdn.parallel.sequence import ContextParallel, SequenceLayout, shard_order
from titan_gdn.parallel.traffic import LayerShape, elements_in, elements_out

MODELS = {"gated_delta_net": qwen3_next, "kimi_delta_attention": kimi_linear}


def build(
    options: LayerOptions,
    exchange: ExchangeName,
    parallel_dims: ParallelDims,
    weights: dict[str, torch.Tensor] | None = None,
    regather: bool = False,
) -> tuple[LinearAttention, LayerShape]:
    """The layer and its shape, split over the mesh of `parallel_dims` (backend "partial_dtensor")."""
    own = {"linear_gate_rank": options.gate_rank} if options.layer == "kimi_delta_attention" else {}
    model = MODELS[options.layer](
        dim=options.dim,
        n_layers=1,
        layer_types=["linear_attention"],
        n_experts=0,
        n_linear_key_heads=options.key_heads,
        n_linear_value_heads=options.value_heads,
        linear_key_head_dim=options.key_dim,
        linear_value_head_dim=options.value_dim,
        **own,
    )
    config = model.linear_layers()[0]
    config.run = LinearAttentionConfig(kernel=options.kernel, exchange=exchange, regather=regather)
    sharded = options.sequence_parallel and options.tp > 1
    set_linear_attention(config, sharded)
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


def measure(options: LayerOptions, exchange: ExchangeName, computes: bool) -> dict[str, Any]:
    """Run the layer on this rank, or of it the exchange alone; figures of this rank."""
    parallel_dims = ParallelDims(
        dp_replicate=1,
        dp_shard=1,
        cp=options.cp,
        tp=options.tp,
        pp=1,
        ep=1,
        world_size=options.cp * options.tp,
        spmd_backend="partial_dtensor",
    )
    layer, shape = build(options, exchange, parallel_dims)
    sharded = options.sequence_parallel and options.tp > 1
    split = options.cp * (options.tp if sharded else 1)
    x = torch.randn(options.batch, options.tokens // split, options.dim, device=device_type)
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
        # The output may still be under way: an operation on it waits.
        return out.to_local() * 1 if isinstance(out, DTensor) else out

    def only_exchange() -> torch.Tensor:
        groups, width = options.key_heads // options.tp, shape.exchanged // options.key_heads

        def project(x: torch.Tensor, run: slice) -> torch.Tensor:
            return x[..., None, :1].expand(-1, -1, run.stop - run.start, width).contiguous()

        def bottleneck(x: torch.Tensor) -> torch.Tensor | None:
            return x[..., : shape.bottleneck].contiguous() if shape.bottleneck else None

        y, narrow, _ = layer.exchange.to_heads(x, project, bottleneck, groups, sequence)
        y = y if narrow is None else y + narrow.sum(-1)[..., None, None]  # so that it has a gradient
        return layer.exchange.to_tokens(y[..., : shape.output // options.key_heads].contiguous(), sequence)

    forward = whole_layer if computes else only_exchange

    with BytesSent() as sent_forward:
        out = forward()
    with BytesSent() as sent_backward:
        out.backward(torch.ones_like(out))
    times = {"forward": [], "backward": []}
    for _ in range(options.repeats):
        dist.barrier()
        begin = _now()
        out = forward()
        middle = _now()
        out.backward(torch.ones_like(out))
        times["forward"].append(middle - begin)
        times["backward"].append(_now() - middle)
    axes = {
        parallel_dims.get_mesh(a).get_group().group_name: a for a in ("cp", "tp") if getattr(options, a) > 1
    }
    size, tokens = x.element_size(), options.batch * options.tokens
    return {
        "exchange": exchange,
        **{f"{way} (s)": statistics.median(seconds) for way, seconds in times.items()},
        "peak memory (MiB)": _peak_memory() / 2**20,
        **{
            f"{axis} {way} (bytes)": sum(sent.bytes[group] for group, name in axes.items() if name == axis)
            for axis in ("cp", "tp")
            for way, sent in (("forward", sent_forward), ("backward", sent_backward))
        },
        "cp formula (bytes)": size
        * (
            elements_in(exchange, shape, tokens, options.cp, options.tp, sharded)
            + elements_out(shape, tokens, options.cp, options.tp)
        )
        if options.cp > 1
        else 0,
    }


def _now() -> float:
    device_module.synchronize()
    return time.perf_counter()


def _peak_memory() -> int:
    if device_type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _rank(
    rank: int, port: int, options: LayerOptions, exchange: ExchangeName, computes: bool, results: Any
) -> None:
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
    """Run each exchange on ranks of its own, so that memory peaks do not mix; print and return figures."""
    rows = []
    try:
        for exchange in options.exchanges:
            rows.append(_on_ranks(options, exchange, computes))
    finally:  # what was measured before an exchange failed is not lost
        if rows:
            _print(options, rows)
        if rows and options.json:
            with open(options.json, "w") as file:
                json.dump({"options": asdict(options), "figures": rows}, file, indent=2)
    return rows


def _on_ranks(options: LayerOptions, exchange: ExchangeName, computes: bool) -> dict[str, Any]:
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
        raise RuntimeError(f"{exchange}: ranks ended with {[process.exitcode for process in ranks]}")
    return results.get()


def _print(options: LayerOptions, rows: list[dict[str, Any]]) -> None:
    table = Table(title=f"{options.layer}, {options.tokens} tokens, CP {options.cp}, TP {options.tp}, rank 0")
    for name in rows[0]:
        table.add_column(name, justify="left" if name == "exchange" else "right")
    for row in rows:
        table.add_row(
            *(
                f"{x:.3f}" if isinstance(x, float) else f"{x:,}" if isinstance(x, int) else x
                for x in row.values()
            )
        )
    Console(width=200).print(table)
