"""What a model trains with unless a TOML file or the command line says otherwise."""

from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from torchtitan.components.validate import Validator
from torchtitan.config import TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

from titan_gdn.assets import BYTE_TOKENIZER
from titan_gdn.data.text_files import TextFilesDataLoader

PATTERNS = (r"(A_log|dt_bias|norm\.weight)$", ".*")
"""Of the names of parameters: those without weight decay, the rest."""


def run_of(spec: ModelSpec) -> Trainer.Config:
    """The run of a model: small and in float32 for flavours called `debug`."""
    debug = spec.flavor.startswith("debug")
    return Trainer.Config(
        model_spec=spec,
        hf_assets_path=BYTE_TOKENIZER,
        loss=ChunkedLossWrapper.Config(
            loss_fn=CrossEntropyLoss.Config(global_vocab_size=spec.model.vocab_size)
        ),
        optimizer=_adamw(3e-3 if debug else 3e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=10 if debug else 200),
        # Document offsets go to the host once a forward, which a CUDA graph cannot hold.
        training=TrainingConfig(
            local_batch_size=4 if debug else 1,
            seq_len=256 if debug else 4096,
            steps=100 if debug else 10000,
            disable_cuda_graphs=True,
            mixed_precision_param="float32" if debug else "bfloat16",
        ),
        dataloader=TextFilesDataLoader.Config(),
        validator=Validator.Config(steps=10, dataloader=TextFilesDataLoader.Config(infinite=False)),
        metrics=MetricsProcessor.Config(log_freq=10),
        checkpoint=CheckpointManager.Config(last_save_model_only=False),
        activation_checkpoint=None if debug else FullAC.Config(),
    )


def _adamw(lr: float) -> OptimizersContainer.Config:
    def group(pattern: str, weight_decay: float) -> ParamGroupConfig:
        kwargs = {"lr": lr, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": weight_decay}
        return ParamGroupConfig(pattern=pattern, optimizer_name="AdamW", optimizer_kwargs=kwargs)

    return OptimizersContainer.Config(param_groups=list(map(group, PATTERNS, (0.0, 0.1))))
