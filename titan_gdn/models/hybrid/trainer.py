"""TorchTitan's trainer, for models that predict the token after the next, too."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.components.loss import IGNORE_INDEX, ChunkedLossWrapper
from torchtitan.distributed import utils as dist_utils
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

from titan_gdn.data.token_shift import labels_after_next, next_tokens
from titan_gdn.models.hybrid.mtp import MultiTokenLoss

Batch = tuple[dict[str, torch.Tensor], torch.Tensor]

_AFTER = "labels_after_next"
"""Where a batch carries these labels from `train_step` to `post_dataloading_process`."""


class HybridTrainer(Trainer):
    """Gives a model with multi-token prediction two rows for each row of the data.

    Rows are shifted before context parallelism shards them, where they are still whole. Without multi-token
    prediction this is TorchTitan's trainer.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        pass

    @property
    def mtp_loss(self) -> MultiTokenLoss | None:
        """The loss of a model with multi-token prediction, None for any other."""
        loss: Any = self.loss_fn.loss_fn if isinstance(self.loss_fn, ChunkedLossWrapper) else self.loss_fn
        return loss if isinstance(loss, MultiTokenLoss) else None

    def post_dataloading_process(
        self, input_dict: dict[str, torch.Tensor], labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Appends the next tokens to the tokens and the labels after the next to the labels, as rows."""
        if self.mtp_loss is None:
            return super().post_dataloading_process(input_dict, labels)
        given = dict(input_dict)
        both = torch.cat([labels, given.pop(_AFTER)])
        given["input"] = torch.cat([given["input"], next_tokens(given["input"], labels)])
        seen = self.ntokens_seen
        inputs, both, extra = super().post_dataloading_process(given, both)
        self.ntokens_seen = seen + both.numel() // 2  # rows of labels after the next are no further tokens
        return inputs, both, extra

    def train_step(self, data_iterator: Iterator[Batch]) -> None:
        """Takes a step, after counting the tokens after the next that all ranks predict in it."""
        loss = self.mtp_loss
        if loss is None:
            return super().train_step(data_iterator)
        batches = [next(data_iterator) for _ in range(self.gradient_accumulation_steps)]
        targets = torch.tensor(0)
        for inputs, labels in batches:
            inputs[_AFTER] = labels_after_next(labels, inputs["positions"])
            targets += (inputs[_AFTER] != IGNORE_INDEX).sum()
        targets = targets.to(self.device)
        if self.parallel_dims.dp_enabled:
            targets = dist_utils.dist_sum_tensor(targets, self.parallel_dims.get_mesh("batch"))
        loss.begin(targets)
        super().train_step(iter(batches))
        if self.metrics_processor.should_log(self.step):
            self._log(loss)

    def _log(self, loss: MultiTokenLoss) -> None:
        assert loss.summed is not None
        mesh = self.parallel_dims.get_optional_mesh("loss") if self.parallel_dims.dp_cp_enabled else None
        value = float(loss.summed) if mesh is None else dist_utils.dist_sum(loss.summed, mesh)
        self.metrics_processor.logger.log({"loss_metrics/mtp_loss": value}, self.step)
        logger.info(f"step: {self.step:2}  loss of the token after the next: {value:8.5f}")
