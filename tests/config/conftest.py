"""A model package without a model, and the configuration of files for it."""

import shutil
import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

from tests.config.cases import MODEL
from titan_gdn import models
from titan_gdn.assets import BYTE_TOKENIZER
from titan_gdn.config.load import load_config
from titan_gdn.config.source import ConfigError
from titan_gdn.data.text_files import TextFilesDataLoader
from titan_gdn.layers.linear_attention import LinearAttentionConfig
from titan_gdn.models.hybrid.activation_checkpoint import SelectiveAC
from titan_gdn.models.hybrid.debug import DebugConfig


@dataclass
class FakeModel:
    linear_attention: LinearAttentionConfig
    overrides: dict[str, Any] = field(default_factory=dict)

    def check(self, config):
        if 6 % config.parallelism.tensor_parallel_degree:
            raise ValueError(f"6 heads, tensor_parallel_degree {config.parallelism.tensor_parallel_degree}")

    def check_device(self):
        pass


@dataclass(frozen=True, kw_only=True)
class Arguments:
    n_layers: int = 2
    rope_factor: float | None = None
    widths: tuple[int, ...] = (64,)
    layer_types: list[str] | None = None
    tied: bool = False
    rope_scaling: dict[str, Any] | None = None

    def __post_init__(self):
        if self.n_layers < 1:
            raise ValueError(f"n_layers = {self.n_layers}: a model has layers")


@pytest.fixture(autouse=True)
def fake_model(monkeypatch, tmp_path):
    """A model package whose flavors are `tiny` and `large`, its tokenizer's folder and its data."""
    shutil.copytree(BYTE_TOKENIZER, tmp_path / "assets")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_text("words")

    def trainer_config(flavor: str, *, linear_attention, converters, **overrides) -> Trainer.Config:
        Arguments(**overrides)
        adamw = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8}
        return Trainer.Config(
            model_spec=ModelSpec("fake", flavor, FakeModel(linear_attention, overrides), *[None] * 4),
            hf_assets_path=str(tmp_path / "assets"),
            dataloader=TextFilesDataLoader.Config(dataset_path=str(tmp_path / "data")),
            training=TrainingConfig(local_batch_size=2, seq_len=64, steps=7),
            parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
            debug=DebugConfig(),
            activation_checkpoint=SelectiveAC.Config(force_recompute_mm_shapes_by_fqns=["gate"]),
            optimizer=OptimizersContainer.Config(
                implementation="for-loop",
                param_groups=[
                    ParamGroupConfig(
                        pattern=r"(A_log|dt_bias|norm\.weight)$",
                        optimizer_name="AdamW",
                        optimizer_kwargs=adamw | {"weight_decay": 0.0},
                    ),
                    ParamGroupConfig(
                        pattern=".*", optimizer_name="AdamW", optimizer_kwargs=adamw | {"weight_decay": 0.1}
                    ),
                ],
            ),
        )

    package, registry = ModuleType("fake_package"), ModuleType("fake_package.config_registry")
    flavor = SimpleNamespace(arguments=Arguments())
    package.flavors = {"tiny": flavor, "large": flavor}
    registry.trainer_config = trainer_config
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setitem(sys.modules, registry.__name__, registry)
    monkeypatch.setattr(models, "MODELS", {"fake": "fake_package", "faker_still": "none"})
    monkeypatch.setattr(models, "load", {"fake": package}.__getitem__)


@pytest.fixture
def load(tmp_path):
    """Loads a file of the text given, with `[model]` unless the text has its own, and command line words."""

    def load(text: str = "", *words: str, world_size: int = 1) -> Trainer.Config:
        file = tmp_path / "run.toml"
        file.write_text(text if "[model]" in text else f"{text}\n{MODEL}")
        return load_config(["--job.config_file", str(file), *words], world_size)

    return load


@pytest.fixture
def error(load):
    """The message of the error that a file of this text, with these words, is."""

    def error(*args: str, world_size: int = 1) -> str:
        with pytest.raises(ConfigError) as raised:
            load(*args, world_size=world_size)
        return str(raised.value)

    return error
