"""Time, share of the machine's matrix FLOP/s, and memory of a chunked rule, compared to a peer."""

import inspect
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from itertools import product
from typing import Any

import torch
from rich.progress import track
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from titan_gdn import ops
from titan_gdn.bench.options import RuleOptions
from titan_gdn.display.tables import console, print_table
from titan_gdn.ops.flops import chunked_rule_flops

Rule = Callable[..., Tensor]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def run(options: RuleOptions) -> list[dict[str, Any]]:
    """Time the contenders in turns at each length; print, draw and return the figures."""
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    contenders = _contenders(options)
    inputs = {tokens: _inputs(options, tokens) for tokens in options.tokens}
    cases = list(product(inputs, contenders))
    memory = {(tokens, name): peak_memory(contenders[name], inputs[tokens]) for tokens, name in cases}
    times: dict[tuple[int, str], list[tuple[float, float]]] = {case: [] for case in cases}
    # Without a GPU the rules compute in float32, and bfloat16 products may be much slower.
    computed_in = torch.float32 if DEVICE == "cpu" else getattr(torch, options.dtype)
    rates = []
    for _ in track(range(options.repeats), "measuring", transient=True):
        rates.append(matrix_rate(computed_in))
        for tokens, name in cases:
            times[tokens, name].append(_time(contenders[name], inputs[tokens]))
    rate = statistics.median(rates)
    rows = []
    for tokens, name in cases:
        forward, backward = (statistics.median(t) for t in zip(*times[tokens, name], strict=True))
        rows.append(
            {
                "tokens": tokens,
                "rule": name,
                "forward (s)": forward,
                "backward (s)": backward,
                "share of matrix rate": sum(_flops(options, tokens)) / (forward + backward) / rate,
                "peak memory (MiB)": memory[tokens, name] / 2**20,
            }
        )
    _print(options, rows, rate)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(
                {"options": asdict(options), "matrix rate (FLOP/s)": rate, "figures": rows}, file, indent=2
            )
    if options.plot:
        _plot(rows, options.plot)
    return rows


def _contenders(options: RuleOptions) -> dict[str, Rule]:
    rule = getattr(ops, options.rule)

    def ours(backend: str) -> Rule:
        return lambda *inputs: rule(*inputs, use_qk_l2norm_in_kernel=True, backend=backend)[0]

    contenders = {f"titan_gdn, {backend}": ours(backend) for backend in options.backends}
    if options.peer == "transformers":
        peer = _transformers(options.rule)
        contenders["transformers"] = lambda *inputs: peer(*inputs, use_qk_l2norm_in_kernel=True)[0]
    return contenders


def _transformers(rule: str) -> Callable:
    """The PyTorch function of transformers. Its wrapper calls FLA if installed, even for CPU tensors."""
    if rule == "chunk_kda":
        from transformers.models.kimi_linear import modeling_kimi_linear as kimi_linear

        return inspect.unwrap(kimi_linear.chunk_kimi_delta_attention)
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

    return inspect.unwrap(qwen3_next.torch_chunk_gated_delta_rule)


def _inputs(options: RuleOptions, tokens: int) -> list[Tensor]:
    """`q, k, v, g, beta` with decays as in an untrained layer."""
    lead, dtype = (options.batch, tokens), getattr(torch, options.dtype)
    q, k = (torch.randn(*lead, options.key_heads, options.key_dim, device=DEVICE, dtype=dtype) for _ in "qk")
    v = torch.randn(*lead, options.value_heads, options.value_dim, device=DEVICE, dtype=dtype)
    channels = (options.key_dim,) if options.rule == "chunk_kda" else ()
    g = -torch.rand(*lead, options.value_heads, *channels, device=DEVICE)
    beta = torch.rand(*lead, options.value_heads, device=DEVICE)
    return [x.requires_grad_() for x in (q, k, v, g, beta)]


def _time(rule: Rule, inputs: list[Tensor]) -> tuple[float, float]:
    """Seconds of one forward and one backward."""
    begin = _now()
    out = rule(*inputs)
    middle = _now()
    torch.autograd.grad(out, inputs, torch.ones_like(out))
    return middle - begin, _now() - middle


def _now() -> float:
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def peak_memory(rule: Rule, inputs: list[Tensor]) -> int:
    """Peak bytes of a forward and a backward, without inputs, output and gradients."""
    if DEVICE == "cuda":
        _time(rule, inputs)  # the first run tunes kernels, which takes buffers of its own
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        _time(rule, inputs)
        peak = torch.cuda.max_memory_allocated() - before
    else:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            _time(rule, inputs)
        peak = _peak_of_allocations(profiler)
    out_and_gradients = [inputs[2], *inputs]
    return peak - sum(x.numel() * x.element_size() for x in out_and_gradients)


def _peak_of_allocations(profiler: profile) -> int:
    """Peak bytes that the CPU allocator had handed out. Exact, unlike the size of the process."""
    profiled: Any = profiler.profiler  # torch declares its results as optional
    events = [event for event in profiled.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def matrix_rate(dtype: torch.dtype, size: int = 1024, seconds: float = 0.1) -> float:
    """FLOP/s of the fastest of several square matrix products."""
    size = size if DEVICE == "cpu" else 8 * size
    a = torch.randn(size, size, device=DEVICE, dtype=dtype)
    best, end = 0.0, _now() + seconds
    while (start := _now()) < end:
        torch.mm(a, a)
        best = max(best, 2 * size**3 / (_now() - start))
    return best


def _flops(options: RuleOptions, tokens: int) -> tuple[int, int]:
    return chunked_rule_flops(
        options.batch * tokens,
        options.key_heads,
        options.value_heads,
        options.key_dim,
        options.value_dim,
        per_channel=options.rule == "chunk_kda",
    )


def _print(options: RuleOptions, rows: list[dict[str, Any]], rate: float) -> None:
    threads = f", {torch.get_num_threads()} threads" if DEVICE == "cpu" else ""
    title = (
        f"{options.rule} on {DEVICE}{threads}, {options.dtype}: batch {options.batch}, "
        f"{options.key_heads} key heads of {options.key_dim}, {options.value_heads} value heads of "
        f"{options.value_dim}; matrix rate {rate / 1e9:,.0f} GFLOP/s"
    )
    first: dict[int, float] = {}
    cells = []
    for row in rows:
        seconds = row["forward (s)"] + row["backward (s)"]
        ratio = seconds / first.setdefault(row["tokens"], seconds)
        figures = [
            f"{x:,}" if isinstance(x, int) else f"{x:.3f}" if isinstance(x, float) else x
            for x in row.values()
        ]
        cells.append([*figures, f"{ratio:.2f}"])
    print_table(console(), title, [*rows[0], "time / first row"], cells)


def _plot(rows: list[dict[str, Any]], path: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    time_axes, memory_axes = figure.subplots(1, 2)
    for name in dict.fromkeys(row["rule"] for row in rows):
        mine = [row for row in rows if row["rule"] == name]
        tokens = [row["tokens"] for row in mine]
        time_axes.loglog(tokens, [r["forward (s)"] + r["backward (s)"] for r in mine], "o-", label=name)
        memory_axes.loglog(tokens, [r["peak memory (MiB)"] for r in mine], "o-", label=name)
    time_axes.set_ylabel("forward and backward (s)")
    memory_axes.set_ylabel("peak memory without inputs, output, gradients (MiB)")
    for axes in (time_axes, memory_axes):
        axes.set_xlabel("tokens")
        axes.grid(which="both", alpha=0.3)
    time_axes.legend()
    figure.savefig(path, dpi=150)
