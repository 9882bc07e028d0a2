"""Whole runs: what a flavour trains with unless a TOML file or the command line says otherwise.

The functions without arguments also serve TorchTitan's own command:
`torchrun -m torchtitan.train --module titan_gdn.models.qwen3_next --config qwen3_next_80b_a3b`.
"""

from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from torchtitan.components.validate import Validator
from torchtitan.config import TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.trainer import Trainer

from titan_gdn.assets import BYTE_TOKENIZER
from titan_gdn.layers.linear_attention import LinearAttentionConfig
from titan_gdn.models.qwen3_next import model_registry
from titan_gdn.text_files import TextFilesDataLoader

NO_WEIGHT_DECAY = r"(A_log|dt_bias|norm\.weight)$"


def _adamw(lr: float) -> OptimizersContainer.Config:
    def group(pattern: str, weight_decay: float) -> ParamGroupConfig:
        kwargs = {"lr": lr, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": weight_decay}
        return ParamGroupConfig(pattern=pattern, optimizer_name="AdamW", optimizer_kwargs=kwargs)

    return OptimizersContainer.Config(param_groups=[group(NO_WEIGHT_DECAY, 0.0), group(".*", 0.1)])


def trainer_config(
    flavor: str, *, linear_attention: LinearAttentionConfig | None = None, **overrides: object
) -> Trainer.Config:
    """The run of a flavour.

    Args:
        flavor: a name in `titan_gdn.models.qwen3_next.flavors`.
        linear_attention: how its linear attention is run.
        **overrides: keyword arguments of `titan_gdn.models.qwen3_next.qwen3_next`.
    """
    spec = model_registry(flavor, linear_attention=linear_attention, **overrides)
    debug = flavor.startswith("debug")
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


def qwen3_next_debug() -> Trainer.Config:
    """A dense model of 4 layers on the standard library's source."""
    return trainer_config("debug")


def qwen3_next_debug_moe() -> Trainer.Config:
    """The same with 8 experts a layer."""
    return trainer_config("debug_moe")


def qwen3_next_80b_a3b() -> Trainer.Config:
    """Qwen3-Next-80B-A3B."""
    return trainer_config("80B-A3B")


def qwen3_next_80b_a3b_1m() -> Trainer.Config:
    """Qwen3-Next-80B-A3B, its context extended to 1,048,576 tokens by YaRN."""
    return trainer_config("80B-A3B-1M")
