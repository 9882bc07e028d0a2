"""The models by the name a TOML file gives them, one folder each."""

import importlib
from types import ModuleType

MODELS: tuple[str, ...] = ("qwen3_next", "kimi_linear")
"""Names that `[model] name` may take."""


def load(name: str) -> ModuleType:
    """Import the model package `name`.

    It offers `flavors` (name to builder of the model's `Config`) and `model_registry`; its
    `config_registry` offers `trainer_config`.

    Raises:
        ValueError: `name` is not one of `MODELS`.
    """
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}; the models are {', '.join(MODELS)}")
    return importlib.import_module(f"{__name__}.{name}")
