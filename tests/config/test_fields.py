"""Fields of dataclasses as keys: choices that are known only when asked, and their documentation."""

from dataclasses import dataclass, field
from typing import Literal

import pytest

from titan_gdn.config.fields import fields_of, keys_of
from titan_gdn.config.sections import configured
from titan_gdn.config.source import COMMAND_LINE, ConfigError, SourcedValue
from titan_gdn.config.types import described

NAMES = {"all_to_all": 1, "state": 2}


@dataclass(kw_only=True, slots=True)
class Exchange:
    name: str = field(default="auto", metadata={"choices": lambda: ("auto", *NAMES)})
    """What is exchanged.

    A second paragraph, for readers of the source.
    """

    often: int = 1


def section(value: object, source: str = "run.toml") -> SourcedValue:
    return SourcedValue({"name": SourcedValue(value, source, ("x", "name"))}, source, ("x",))


def test_a_field_with_choices_takes_one_of_them():
    assert fields_of(Exchange)["name"] == Literal["auto", "all_to_all", "state"]
    assert configured(Exchange(), section("state")) == Exchange(name="state")
    assert configured(Exchange(), section(["state"], COMMAND_LINE)) == Exchange(name="state")


def test_choices_are_asked_for_when_a_value_is_read(monkeypatch):
    wrong = 'run.toml: x.name = "mine": expected "auto" or "all_to_all" or "state".'
    with pytest.raises(ConfigError, match=f"^{wrong}$"):
        configured(Exchange(), section("mine"))
    monkeypatch.setitem(NAMES, "mine", 3)
    assert configured(Exchange(), section("mine")).name == "mine"


def test_a_misspelled_choice_names_the_nearest():
    with pytest.raises(ConfigError, match='Did you mean "state"\\?$'):
        configured(Exchange(), section("stat"))


def test_the_reference_lists_choices_default_and_first_paragraph():
    name, often = keys_of(Exchange(name="state"))
    assert described(name.annotation) == '"auto" or "all_to_all" or "state"'
    assert (name.default, name.doc) == ("state", "What is exchanged.")
    assert (often.default, often.doc) == (1, "")
