"""Initializers of weights, and the linears that use them."""

from functools import partial

from torch import nn
from torchtitan.models.common import Linear

NORMAL = partial(nn.init.normal_, std=0.02)
"""`initializer_range` of the published configurations."""

WEIGHT = {"weight": NORMAL}
ONES = {"weight": nn.init.ones_}


def linear(in_features: int, out_features: int) -> Linear.Config:
    """Returns the configuration of a linear without bias, its weight initialized with `NORMAL`."""
    return Linear.Config(in_features=in_features, out_features=out_features, param_init=WEIGHT)
