"""Checks that this machine has what a run needs: devices, packages, and a kernel of the optimizer."""

import importlib.util

import torch
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.tools.utils import device_type
from torchtitan.trainer import Trainer

from titan_gdn.config.source import ConfigError


def check_machine(config: Trainer.Config) -> None:
    """Check what a run needs of the machine, except its files.

    Raises:
        ConfigError: It lacks something; the message names the key that needs it.
    """
    if device_type == "cpu":
        _check_without_gpu(config)
    for key, used, package in (
        # TorchTitan would log that the package is missing, and train without Weights & Biases.
        ("metrics.enable_wandb = true", config.metrics.enable_wandb, "wandb"),
        ('comm.mode = "torchcomms"', config.comm.mode == "torchcomms", "torchcomms"),
    ):
        if used and importlib.util.find_spec(package) is None:
            raise ConfigError(f"{key}: the package {package} is not installed (pip install {package})")
    _check_optimizer(config.optimizer)


def _check_without_gpu(config: Trainer.Config) -> None:
    if config.training.enable_cpu_offload:
        raise ConfigError(
            "training.enable_cpu_offload = true: without a GPU, everything is on the CPU already; remove it"
        )
    if config.profiler.enable_memory_snapshot:
        raise ConfigError(
            "profiler.enable_memory_snapshot = true: it records GPU memory, and there is no GPU; remove it"
        )
    if config.optimizer.implementation == "fused_opt_states_bf16":
        raise ConfigError(
            'optimizer.implementation = "fused_opt_states_bf16" needs a GPU. Possible: for-loop, foreach, '
            "fused."
        )
    if getattr(config.checkpoint, "async_mode", "") == "async_with_pinned_mem":
        raise ConfigError(
            'checkpoint.async_mode = "async_with_pinned_mem" needs a GPU. Possible: disabled, async.'
        )


def _check_optimizer(config: OptimizersContainer.Config) -> None:
    """Take a step with each parameter group's optimizer, of one element, as TorchTitan builds it."""
    implementation = OptimizersContainer._build_impl_kwargs(config)
    for group in config.param_groups:
        x = torch.zeros(1, requires_grad=True)
        x.grad = torch.zeros(1)
        name = group.optimizer_name
        try:
            optimizer = OptimizersContainer._resolve_optimizer_factory(name)(
                [{"params": [x], **implementation, **group.optimizer_kwargs}],
                **config.optimizer_factory_kwargs_by_name.get(name, {}),
            )
            if device_type == "cpu":  # else ranks would begin with a step on one GPU
                optimizer.step()
        except (AssertionError, RuntimeError, TypeError, ValueError) as error:
            raise ConfigError(
                f'optimizer.implementation = "{config.implementation}" with the arguments of {name}, '
                f"{group.optimizer_kwargs}: {error}"
            ) from error
