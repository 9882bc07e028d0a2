"""TorchTitan's validator, with a sentence for a validation set that holds less than a batch."""

from dataclasses import dataclass
from typing import Any

from torch import nn
from torchtitan.components import validate

from titan_gdn.data.files import DataError


class Validator(validate.Validator):
    """Validates as TorchTitan does.

    With pipeline stages, a batch is several batches of the data loader, so that only the validator knows
    whether the data hold one.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(validate.Validator.Config):
        """The section `[validator]`."""

    def validate(self, model_parts: list[nn.Module], step: int) -> None:
        """Log the loss of the validation set.

        Raises:
            DataError: It holds less than one batch.
        """
        self._read = False
        try:
            super().validate(model_parts, step)
        except AssertionError as error:
            if self._read:
                raise
            raise DataError(
                "the validation data hold less than one batch for each data-parallel rank "
                f"(training.local_batch_size = {self.local_batch_size} rows of {self.seq_len} tokens): set "
                "another validator.dataloader.dataset_path, or a number of validator.steps, for which they "
                "are read over and over"
            ) from error

    def post_dataloading_process(self, *args: Any, **kwargs: Any) -> Any:
        """TorchTitan's hook for a batch that was read."""
        self._read = True
        return super().post_dataloading_process(*args, **kwargs)
