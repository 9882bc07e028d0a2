"""The default training configuration of a model, which a TOML file and the command line change."""

from dataclasses import dataclass
from typing import Any, Literal, cast

from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from torchtitan.config import TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

from titan_gdn.assets import BYTE_TOKENIZER
from titan_gdn.data.text_files import TextFilesDataLoader
from titan_gdn.data.validator import Validator
from titan_gdn.models.hybrid.checkpoint_manager import HybridCheckpointManager
from titan_gdn.models.hybrid.debug import DebugConfig
from titan_gdn.models.hybrid.mtp import MultiTokenLoss
from titan_gdn.models.hybrid.trainer import HybridTrainer

PATTERNS = (r"(A_log|dt_bias|norm\.weight)$", ".*")
"""Patterns of parameter names: those without weight decay, then the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDefaults:
    """The training settings that depend on the flavor. The defaults suit a published model."""

    lr: float = 3e-4
    warmup_steps: int = 200
    local_batch_size: int = 1
    seq_len: int = 4096
    steps: int = 10000
    mixed_precision_param: Literal["bfloat16", "float32"] = "bfloat16"
    full_checkpointing: bool = True


DEBUG_RUN = RunDefaults(
    lr=3e-3,
    warmup_steps=10,
    local_batch_size=4,
    seq_len=256,
    steps=100,
    mixed_precision_param="float32",
    full_checkpointing=False,
)
"""The settings of a run that takes minutes on a CPU."""


def run_of(spec: ModelSpec, run: RunDefaults) -> Trainer.Config:
    """Returns the training configuration of a model.

    Args:
        spec: the model.
        run: the settings that depend on the flavor.
    """
    return HybridTrainer.Config(
        model_spec=spec,
        hf_assets_path=BYTE_TOKENIZER,
        loss=ChunkedLossWrapper.Config(loss_fn=_loss(cast(Any, spec.model))),
        optimizer=_adamw(run.lr),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=run.warmup_steps),
        training=TrainingConfig(
            local_batch_size=run.local_batch_size,
            seq_len=run.seq_len,
            steps=run.steps,
            # Each forward copies document offsets to the host, which a CUDA graph does not support.
            disable_cuda_graphs=True,
            mixed_precision_param=run.mixed_precision_param,
        ),
        dataloader=TextFilesDataLoader.Config(),
        validator=Validator.Config(steps=10, dataloader=TextFilesDataLoader.Config()),
        metrics=MetricsProcessor.Config(log_freq=10),
        checkpoint=HybridCheckpointManager.Config(last_save_model_only=False),
        activation_checkpoint=FullAC.Config() if run.full_checkpointing else None,
        debug=DebugConfig(),
    )


def _loss(model: Any) -> CrossEntropyLoss.Config:
    if model.mtp is None:
        return CrossEntropyLoss.Config(global_vocab_size=model.vocab_size)
    return MultiTokenLoss.Config(global_vocab_size=model.vocab_size, weight=model.mtp.loss_weight)


def _adamw(lr: float) -> OptimizersContainer.Config:
    def group(pattern: str, weight_decay: float) -> ParamGroupConfig:
        kwargs = {"lr": lr, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": weight_decay}
        return ParamGroupConfig(pattern=pattern, optimizer_name="AdamW", optimizer_kwargs=kwargs)

    return OptimizersContainer.Config(param_groups=list(map(group, PATTERNS, (0.0, 0.1))))
