"""`[optimizer]`: keys for all parameter groups, and groups of one's own."""

import dataclasses
import sys

import pytest
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

from tests.config.cases import named

GROUP = '[[optimizer.param_groups]]\npattern = "norm"\noptimizer_name = "AdamW"\n'


def test_the_optimizers_arguments_reach_all_groups(load):
    text = '[optimizer]\nname = "Adam"\nlr = 2\nbetas = [0.8, 0.9]\neps = 1e-6'
    for group in load(text).optimizer.param_groups:
        assert group.optimizer_name == "Adam"
        assert group.optimizer_kwargs["lr"] == 2.0
        assert group.optimizer_kwargs["betas"] == (0.8, 0.9)
        assert group.optimizer_kwargs["eps"] == 1e-6
    words = ["--optimizer.lr", "1e-4", "--optimizer.betas", "0.7", "0.9", "--optimizer.amsgrad"]
    optimizer = load(text, *words).optimizer
    assert [group.optimizer_kwargs["lr"] for group in optimizer.param_groups] == [1e-4, 1e-4]
    assert optimizer.param_groups[0].optimizer_kwargs["betas"] == (0.7, 0.9)
    assert optimizer.param_groups[1].optimizer_kwargs["amsgrad"] is True


def test_weight_decay_reaches_only_the_groups_that_decay(load):
    groups = load("[optimizer]\nweight_decay = 0.3").optimizer.param_groups
    assert [group.optimizer_kwargs["weight_decay"] for group in groups] == [0.0, 0.3]
    assert [group.optimizer_kwargs["lr"] for group in groups] == [1e-3, 1e-3]


def test_a_weight_decay_that_would_reach_no_group_is_an_error(error, monkeypatch):
    registry = sys.modules["fake_package.config_registry"]
    original = registry.trainer_config

    def undecayed(*args, **kwargs):
        config = original(*args, **kwargs)
        del config.optimizer.param_groups[1]
        return config

    monkeypatch.setattr(registry, "trainer_config", undecayed)
    assert "no parameter group of this flavor decays" in error("[optimizer]\nweight_decay = 0.3")
    monkeypatch.setattr(
        registry,
        "trainer_config",
        lambda *args, **kwargs: dataclasses.replace(
            original(*args, **kwargs), optimizer=OptimizersContainer.Config()
        ),
    )
    assert "no parameter groups" in error("[optimizer]\nlr = 0.3")


def test_the_section_keeps_the_fields_of_torchtitan(load):
    optimizer = load('[optimizer]\nimplementation = "foreach"\nlr = 0.5').optimizer
    assert optimizer.implementation == "foreach"
    assert [group.pattern for group in optimizer.param_groups][1] == ".*"


def test_an_unknown_argument_of_the_optimizer_lists_arguments_and_fields(error):
    message = error("[optimizer]\nmomentum = 0.9")
    assert 'unknown key "momentum"' in message
    for name in ("name", "lr", "weight_decay", "betas", "eps", "implementation", "param_groups"):
        assert name in message
    assert "params," not in message


def test_values_that_the_optimizer_refuses_are_an_error_before_there_are_weights(error):
    assert "run.toml: optimizer.lr = -1.0: expected at least 0" in error("[optimizer]\nlr = -1")
    assert "optimizer.betas = (0.9, 1.5): expected two numbers from 0 to below 1" in error(
        "", "--optimizer.betas", "0.9", "1.5"
    )
    assert "eps = -1.0: expected at least 1.2e-38" in error(f"{GROUP}optimizer_kwargs = {{lr = 1, eps = -1}}")


def test_an_array_of_tables_replaces_the_groups(load):
    text = f"{GROUP}optimizer_kwargs = {{lr = 1, betas = [0.9, 0.99]}}\n" + (
        '[[optimizer.param_groups]]\npattern = ".*"\noptimizer_name = "Adam"\n'
        "[optimizer.param_groups.optimizer_kwargs]\nlr = 1e-4"
    )
    assert load(text).optimizer.param_groups == [
        ParamGroupConfig(
            pattern="norm", optimizer_name="AdamW", optimizer_kwargs={"lr": 1.0, "betas": (0.9, 0.99)}
        ),
        ParamGroupConfig(pattern=".*", optimizer_name="Adam", optimizer_kwargs={"lr": 1e-4}),
    ]
    assert load(text, "--optimizer.implementation", "foreach").optimizer.implementation == "foreach"


@named(
    "text, problem",
    {
        "no arguments": (GROUP, "[optimizer.param_groups.0]: optimizer_kwargs is missing"),
        "no learning rate": (f"{GROUP}optimizer_kwargs = {{}}", "lr is missing"),
        "no pattern": ('[[optimizer.param_groups]]\noptimizer_name = "Adam"', "pattern is missing"),
        "no optimizer": ('[[optimizer.param_groups]]\npattern = ".*"', "optimizer_name is missing"),
        "wrong type": (
            f'{GROUP}optimizer_kwargs = {{lr = "fast"}}',
            'optimizer.param_groups.0.optimizer_kwargs.lr = "fast": expected float',
        ),
        "unknown argument": (f"{GROUP}optimizer_kwargs = {{lr = 1, beta1 = 0.9}}", 'unknown key "beta1"'),
        "unknown optimizer": (GROUP.replace("AdamW", "Adagrad"), '"Adagrad": expected "Adam" or "AdamW"'),
        "no regular expression": (
            f"{GROUP.replace('norm', '(')}optimizer_kwargs = {{lr = 1}}",
            "expected a regular expression",
        ),
        "array of ints": ("[optimizer]\nparam_groups = [1]", "expected an array of tables"),
        "int": ("[optimizer]\nparam_groups = 1", "expected an array of tables"),
        "table": ("[optimizer.param_groups]\npattern = 1", "expected an array of tables"),
        "array of an int and a table": (
            "[optimizer]\nparam_groups = [1, {pattern = 1}]",
            "expected a table, [optimizer.param_groups.0]",
        ),
    },
)
def test_a_wrong_parameter_group_is_an_error(error, text, problem):
    assert problem in error(text)


def test_keys_for_all_groups_beside_an_array_of_groups_are_an_error(error):
    group = f"{GROUP}optimizer_kwargs = {{lr = 1}}"
    assert "optimizer.lr = 3: [[optimizer.param_groups]] replaces" in error(f"[optimizer]\nlr = 3\n{group}")
    assert "--optimizer.lr 3: [[optimizer.param_groups]] replaces" in error(group, "--optimizer.lr", "3")


def test_groups_on_the_command_line_are_an_error(error):
    words = ["--optimizer.param_groups.0.optimizer_kwargs.lr", "1"]
    assert "expected an array of tables in the file" in error("", *words)
    assert "expected an array of tables in the file" in error("", "--optimizer.param_groups", "1")
    assert "expected a table" in error(f"{GROUP}optimizer_kwargs = {{lr = 1}}", *words)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("lr", "-1", "at least 0"),
        ("weight_decay", "-0.5", "at least 0"),
        ("eps", "0", "at least 1.2e-38"),
        ("eps", "1e-50", "at least 1.2e-38"),
        ("betas", "[0.9, 1.0]", "two numbers from 0 to below 1"),
        ("betas", "[-0.1, 0.9]", "two numbers from 0 to below 1"),
    ],
)
def test_a_number_outside_its_range_names_its_key(error, key, value, expected):
    message = error(f"[optimizer]\n{key} = {value}")
    assert f"run.toml: optimizer.{key} = " in message and f": expected {expected}" in message


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("differentiable = true\nimplementation = 'fused'", "does not support differentiable=True"),
        ("optimizer_factory_kwargs_by_name = {AdamW = {lrr = 1}}", "unexpected keyword argument 'lrr'"),
    ],
)
def test_what_pytorch_would_refuse_to_build_is_an_error_before_the_run(error, text, problem):
    message = error(f"[optimizer]\n{text}")
    assert "optimizer.implementation = " in message and problem in message


def test_states_in_bfloat16_need_a_gpu(error, monkeypatch):
    monkeypatch.setattr("titan_gdn.config.machine_checks.device_type", "cpu")
    message = error('[optimizer]\nimplementation = "fused_opt_states_bf16"')
    assert "needs a GPU. Possible: for-loop, foreach, fused." in message
