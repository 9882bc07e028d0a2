"""The model families by the names that a TOML file gives them, one folder each."""

import importlib
from types import ModuleType

MODELS: dict[str, str] = {
    "qwen3_next": "titan_gdn.models.qwen3_next",
    "kimi_linear": "titan_gdn.models.kimi_linear",
}
"""The possible values of `model.name`, and the package of each family."""


def load(name: str) -> ModuleType:
    """Import the package of a model family.

    It has `flavors` (see `titan_gdn.models.hybrid.Flavor`) and `model_registry`, and a module
    `config_registry` with `trainer_config`.

    Raises:
        ValueError: `name` is not in `MODELS`.
    """
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}; the models are {', '.join(MODELS)}")
    return importlib.import_module(MODELS[name])
