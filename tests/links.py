"""Times a layer with each exchange on two ranks, over loopback or a slow link between them."""

import contextlib
import ctypes
import os
import shutil
import statistics
import subprocess
import time
from dataclasses import replace

import torch
import torch.distributed as dist

CLONE_NEWNET = 0x40000000
RATE_MBIT = 20


@contextlib.contextmanager
def slow_link():
    """Create two network namespaces and a link of `RATE_MBIT`. Yield their names and the error, if any."""
    names = [f"titan_gdn_{os.getpid()}_{end}" for end in range(2)]
    ends = [f"tg{os.getpid() % 10**6}_{end}" for end in range(2)]
    commands = [
        *(["ip", "netns", "add", name] for name in names),
        ["ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1]],
    ]
    for number, (name, end) in enumerate(zip(names, ends, strict=True)):
        inside = ["ip", "netns", "exec", name]
        commands += [
            ["ip", "link", "set", end, "netns", name],
            [*inside, "ip", "link", "set", end, "name", "link0"],
            [*inside, "ip", "addr", "add", f"10.77.0.{number + 1}/24", "dev", "link0"],
            [*inside, "ip", "link", "set", "lo", "up"],
            [*inside, "ip", "link", "set", "link0", "up"],
            [*inside, "tc", "qdisc", "add", "dev", "link0", "root", "tbf"]
            + ["rate", f"{RATE_MBIT}mbit", "burst", "64kb", "latency", "200ms"],
        ]
    try:
        yield names, _run(commands)
    finally:
        _run([["ip", "netns", "del", name] for name in names])


def _run(commands):
    for command in commands:
        if not shutil.which(command[0]):
            return f"there is no {command[0]}"
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
        if done.returncode:
            return f"{' '.join(command)}: {done.stderr.strip()}"
    return None


def _enter(namespace):
    """Move this process into a network namespace. It must not have started threads yet."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as file:
        if libc.setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    os.environ.update(MASTER_ADDR="10.77.0.1", GLOO_SOCKET_IFNAME="link0")


def race(options, namespaces=None, repeats=5):
    """Return each exchange's median seconds, the cost model's prediction for this link, and the machine."""
    from tests import layer_cases
    from titan_gdn.bench.layer import mesh_of, prepare, run_once
    from titan_gdn.parallel.cost import cost
    from titan_gdn.parallel.exchange.registry import EXCHANGES, traffic
    from titan_gdn.parallel.machine import Machine

    if namespaces is not None:
        _enter(namespaces[int(os.environ["RANK"])])
    layer_cases.set_up()
    mesh = mesh_of(options)
    prepared = {name: prepare(options, name, True, mesh) for name in EXCHANGES}
    seconds = {name: [] for name in EXCHANGES}
    for turn in range(repeats + 1):  # the first warms up
        for name, (forward, _, _) in prepared.items():
            spent = sum(run_once(forward))
            if turn:
                seconds[name].append(spent)
    measured = {name: statistics.median(spent) for name, spent in seconds.items()}

    _, shape, batch = prepared["state"]
    flops = _layer_flops(shape, batch)
    alone = _alone(options)
    latency, bandwidth = _link(mesh.get_mesh("cp"))
    machine = Machine(
        inside_bandwidth=bandwidth / 1e9, inside_latency=latency * 1e6, tflops=flops / alone / 1e12
    )
    costs = {name: cost(traffic(name, shape, batch), batch, machine, False).total for name in EXCHANGES}
    return measured, {name: alone + spent for name, spent in costs.items()}, machine


def _layer_flops(shape, batch):
    """Return the FLOPs of projections and rule, forward and backward, on this rank."""
    from titan_gdn.ops.flops import chunked_rule_flops

    projections = 3 * 2 * shape.width * (shape.exchanged + 2 * shape.output)
    heads = (shape.key_heads, shape.value_heads, shape.key_dim, shape.value_dim)
    return batch.tokens_of_cp_rank * projections + sum(chunked_rule_flops(batch.tokens_of_cp_rank, *heads))


def _alone(options):
    """Return the median seconds of the layer on a rank's tokens without any communication."""
    from torchtitan.distributed import ParallelDims

    from titan_gdn.bench.layer import prepare, run_once

    ranks = dist.get_world_size()
    dims = ParallelDims(
        dp_replicate=1,
        dp_shard=ranks,
        cp=1,
        tp=1,
        pp=1,
        ep=1,
        world_size=ranks,
        spmd_backend="partial_dtensor",
    )
    dims.build_mesh()
    one = replace(options, cp=1, tokens=options.tokens // ranks)
    forward, _, _ = prepare(one, "state", True, dims)
    return statistics.median([sum(run_once(forward)) for _ in range(5)][1:])


def _link(mesh):
    """Return the seconds of a small collective and the bandwidth of a large one."""
    from titan_gdn.parallel.collectives import gather_sequence

    def seconds(elements):
        x, spent = torch.zeros(1, elements), []
        for _ in range(6):
            dist.barrier()
            begin = time.perf_counter()
            gather_sequence(x, mesh)
            spent.append(time.perf_counter() - begin)
        return statistics.median(spent[1:])

    small, size = seconds(1), 1 << 18
    return small, 4 * size / max(seconds(size) - small, 1e-9)
