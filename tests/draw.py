"""Draws from large matrices of cases: few cases that still hold every combination of some parameters."""

import itertools
import random

import pytest


def covering(cases, strength, start=(), seed=0):
    """Draw cases until every combination of values that any `strength` parameters take together appears.

    The draw is the same in every process. It takes the case with the most new combinations, again and again.

    Args:
        cases: tuples of equally many parameters.
        strength: 1 for every value of every parameter, 2 for every pair of values, and so on.
        start: cases that are drawn already; the result begins with them.
        seed: decides between cases with equally many new combinations.
    """
    left = {case: _combinations(case, strength) for case in random.Random(seed).sample(cases, len(cases))}
    missing = set().union(*left.values()).difference(*(left[case] for case in start))
    drawn = list(start)
    while missing:
        drawn.append(max(left, key=lambda case: len(left[case] & missing)))
        missing -= left[drawn[-1]]
    return drawn


def _combinations(case, strength):
    return set(itertools.combinations(enumerate(case), strength))


def in_sets(cases, fast, slow=None, name=None):
    """Cases for `pytest.mark.parametrize`, each marked with the set of tests that it belongs to.

    Args:
        cases: values of one parameter, or tuples with one value for each.
        fast: the cases that every run of pytest takes.
        slow: the cases that `--slow` adds; all others if None, else what is left over is for `--nightly`.
        name: makes each case a single parameter, even a tuple, with the id that this function returns.
    """
    parameters = []
    for case in cases:
        marks = ()
        if case not in fast:
            marks = pytest.mark.slow if slow is None or case in slow else pytest.mark.nightly
        values = case if isinstance(case, tuple) and name is None else (case,)
        parameters.append(pytest.param(*values, marks=marks, id=None if name is None else name(case)))
    return parameters


def selected(request, test, parameter):
    """The values of a parameter with which a test is about to run: what a pool of ranks must compute for it.

    Args:
        request: of a fixture with parameters, whose present value counts, or without.
        test: the name of the test function.
        parameter: the name of the parameter.
    """
    values = []
    for item in request.session.items:
        if getattr(item, "originalname", None) == test:
            parameters = item.callspec.params
            if parameters.get(request.fixturename) == getattr(request, "param", None):
                values.append(parameters[parameter])
    return values
