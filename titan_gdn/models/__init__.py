"""The model families, one folder each, by the names that TOML files use."""

import importlib
from types import ModuleType

MODELS: dict[str, str] = {
    "qwen3_next": "titan_gdn.models.qwen3_next",
    "qwen3_5": "titan_gdn.models.qwen3_5",
    "kimi_linear": "titan_gdn.models.kimi_linear",
}
"""The possible values of `model.name`, with the package of each family."""


def load(name: str) -> ModuleType:
    """Imports the package of a model family.

    The package has `flavors` (see `titan_gdn.models.hybrid.Flavor`) and `model_registry`, and its module
    `config_registry` has `trainer_config`.

    Args:
        name: a key of `MODELS`.

    Raises:
        ValueError: `name` is not in `MODELS`.
    """
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}; the models are {', '.join(MODELS)}")
    return importlib.import_module(MODELS[name])
