"""A setting of torch.compile's partitioner that a memory budget needs (torch 2.14)."""

import torch._functorch.config


def ignore_process_groups() -> None:
    """Let the partitioner count process groups as objects of no size, in this process.

    A compiled block takes the process groups of its collectives as arguments. With a memory budget, the
    partitioner asks for the size of every argument and raises for objects that may hold tensors. Process
    groups hold none.
    """
    torch._functorch.config.unsafe_treat_script_objects_as_zero_size = True
