"""Shifts the rows of a data loader for multi-token prediction: its inputs and its labels."""

import torch
from torch import Tensor
from torchtitan.components.loss import IGNORE_INDEX


def next_tokens(tokens: Tensor, labels: Tensor) -> Tensor:
    """Returns the token after each token.

    That is the label, because the last token of a document is a label only. A masked label says nothing about
    the token, so there the next input is taken: it belongs to the same document, or the position has no
    target (see `labels_after_next`) and nothing depends on it.

    Args:
        tokens: `[B, L]` whole rows, not shards.
        labels: `[B, L]`, the next token of the same document, or `IGNORE_INDEX`.
    """
    following = torch.cat([tokens[:, 1:], tokens[:, -1:]], 1)
    return torch.where(labels == IGNORE_INDEX, following, labels)


def labels_after_next(labels: Tensor, positions: Tensor) -> Tensor:
    """Returns the label of the next position, `IGNORE_INDEX` where a document or a row ends.

    Args:
        labels: `[B, L]` whole rows, not shards.
        positions: `[B, L]`; 0 begins a document.
    """
    after = torch.full_like(labels, IGNORE_INDEX)
    after[:, :-1] = torch.where(positions[:, 1:] == 0, IGNORE_INDEX, labels[:, 1:])
    return after
