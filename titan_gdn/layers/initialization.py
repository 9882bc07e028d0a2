"""Linears and how their weights are initialized."""

from functools import partial

from torch import nn
from torchtitan.models.common import Linear

NORMAL = partial(nn.init.normal_, std=0.02)
"""`initializer_range` of the published configurations."""

WEIGHT = {"weight": NORMAL}
ONES = {"weight": nn.init.ones_}


def linear(in_features: int, out_features: int) -> Linear.Config:
    """A linear without bias."""
    return Linear.Config(in_features=in_features, out_features=out_features, param_init=WEIGHT)
