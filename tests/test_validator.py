"""The validator where the data hold less than a batch, which only it knows with pipeline stages."""

from types import SimpleNamespace

import pytest
import torch

from titan_gdn.data.files import DataError
from titan_gdn.data.validator import Validator


def validator(batches, microbatches):
    """A validator of two-row batches, each of one or two batches of the data loader."""
    made = object.__new__(Validator)
    batch = ({"input": torch.zeros(1, 4)}, torch.zeros(1, 4, dtype=torch.long))
    made.config = Validator.Config(steps=-1)
    made.dl_config = SimpleNamespace(build=lambda **_: [batch] * batches)
    made.parallelism = SimpleNamespace(pipeline_parallel_microbatch_size=2 // microbatches)
    made.parallel_dims = SimpleNamespace(
        pp_enabled=microbatches > 1, cp_enabled=False, dp_enabled=False, dp_cp_enabled=False
    )
    made.metrics_processor = SimpleNamespace(ntokens_since_last_log=0, log_validation=lambda **_: None)
    made.local_batch_size, made.seq_len, made.dp_world_size, made.dp_rank, made.tokenizer = 2, 4, 1, 0, None
    made.parallelism.spmd_backend = "partial_dtensor"
    made.validation_context, made.loss_fn = torch.no_grad, lambda *_: (torch.ones(()), None)
    return made


@pytest.mark.parametrize(("batches", "microbatches"), [(0, 1), (1, 2)])
def test_data_of_less_than_a_batch_are_an_error_with_the_keys(batches, microbatches):
    with pytest.raises(DataError, match=r"local_batch_size = 2 rows of 4 tokens.*validator\.steps"):
        validator(batches, microbatches).validate([torch.nn.Identity()], 1)


def test_one_batch_suffices_and_an_assertion_of_the_model_is_not_taken_for_missing_data():
    def fail(*_, **__):
        raise AssertionError("of the model")

    validator(1, 1).validate([torch.nn.Identity()], 1)
    model = torch.nn.Identity()
    model.forward = fail
    with pytest.raises(AssertionError, match="of the model"):
        validator(1, 1).validate([model], 1)
