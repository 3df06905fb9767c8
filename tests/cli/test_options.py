"""One table says what each option sets."""

from __future__ import annotations

import inspect

import pytest

from paceline.cli import doctor, options, run, submit, sweep
from paceline.spec.tables import Tables


@pytest.mark.parametrize("key", options.KEYS.values())
def test_every_option_sets_a_key_that_there_is(key: str) -> None:
    table, name = key.split(".")
    assert name in type(getattr(Tables(), table)).model_fields


def test_every_option_is_of_some_verb() -> None:
    taken = {
        name for verb in (run, submit, sweep, doctor) for name in inspect.signature(verb.command).parameters
    }
    assert set(options.KEYS) <= taken


def test_what_was_not_typed_sets_nothing() -> None:
    assert options.flags_of(nodes=None, exclusive=False, no_check=False, data=[], env=None) == []


def test_what_was_typed_is_known_by_its_name() -> None:
    found = options.flags_of(gpus=0, exclusive=True, no_check=True, data=["a"], env=["A=1"])
    assert [(flag.name, flag.key, flag.value) for flag in found] == [
        ("--gpus", "job.gpus_per_node", 0),
        ("--exclusive", "job.exclusive", True),
        ("--no-check", "launch.check", False),
        ("--data", "data.stage", ["a"]),
        ("--env", "environment.variables", {"A": "1"}),
    ]
