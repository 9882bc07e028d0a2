"""Prints which sizes of Qwen3.5 fit 1,048,576 tokens on 8, 64 and 512 GPUs.

`python docs/figures/list_sizes.py` prints the table of `docs/million_tokens.md`. For each number of GPUs it
plans some meshes and takes the one that shards a sequence over the fewest GPUs among those that fit; if none
fits, the one that needs the least memory.
"""

import logging

from titan_gdn.config.load import ConfigError, load_config
from titan_gdn.models.qwen3_5 import flavors
from titan_gdn.plan.plan import make_plan

FILE = "train_configs/qwen3_5_35B_1M.toml"
MESHES = {
    8: ((8, 1), (4, 2), (2, 4), (1, 8)),
    64: ((8, 1), (8, 2), (8, 4), (8, 8)),
    512: ((8, 1), (8, 2), (8, 4), (8, 8)),
}
"""Degrees of TP and CP for each number of GPUs. FSDP takes the rest, and experts as many ranks as it can."""


def main() -> None:
    """Prints the table, in Markdown."""
    logging.disable(logging.WARNING)
    print("| size | " + " | ".join(f"{world_size} GPUs" for world_size in MESHES) + " |")
    print("|---|" + "---|" * len(MESHES))
    for flavor in (name for name in flavors if not name.startswith("debug")):
        cells = [_cell(flavor, world_size) for world_size in MESHES]
        print(f"| `{flavor}` | " + " | ".join(cells) + " |", flush=True)


def _cell(flavor: str, world_size: int) -> str:
    found = []
    for tp, cp in MESHES[world_size]:
        experts = flavors[flavor].arguments.n_experts
        degrees = {"tensor": tp, "context": cp, "expert": min(experts, world_size) if experts else 1}
        argv = ["--job.config_file", FILE, "--model.flavor", flavor]
        for name, degree in degrees.items():
            argv += [f"--parallelism.{name}_parallel_degree", str(degree)]
        try:
            plan = make_plan(load_config(argv, world_size, here=False), world_size)
        except ConfigError:  # the mesh does not divide the model
            continue
        memory = plan.memory.total / 2**30
        [exchanges] = plan.exchanges
        taken = exchanges.taken if cp > 1 else "no exchange"
        found.append((not plan.fits, memory if not plan.fits else tp * cp, memory, tp, cp, taken))
    too_large, _, memory, tp, cp, taken = min(found)
    mesh = f"TP {tp}, CP {cp}, {taken}: {memory:.0f} GiB"
    return f"no ({mesh})" if too_large else mesh


if __name__ == "__main__":
    main()
