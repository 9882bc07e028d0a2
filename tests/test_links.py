"""The cost model against the clock: layers under each exchange in turns, over two links."""

import contextlib
import itertools

import pytest

from tests import links, ranks
from titan_gdn.bench.options import LayerOptions

# Narrow hidden states and short keys, so that what crosses and what is computed twice is most of the layer.
OPTIONS = LayerOptions(dim=64, key_heads=4, value_heads=8, key_dim=32, value_dim=32, tokens=2048)
FAR_APART = 1.5


@pytest.mark.slow
@pytest.mark.parametrize("link", ["loopback", "slow"])
def test_where_the_model_sees_a_clear_difference_the_clock_agrees(link):
    where = links.slow_link() if link == "slow" else contextlib.nullcontext((None, None))
    with where as (names, reason):
        if reason:
            pytest.skip(f"no link between two network namespaces here: {reason}")
        measured, predicted, machine = ranks.run(links.race, 2, OPTIONS, names, timeout=280)[0]
    pairs = [
        (slow, fast)
        for slow, fast in itertools.permutations(predicted, 2)
        if predicted[slow] > FAR_APART * predicted[fast]
    ]
    assert pairs, (predicted, machine)
    for slow, fast in pairs:
        assert measured[slow] > measured[fast], (measured, predicted, machine)
    print(link, machine, measured, predicted)
