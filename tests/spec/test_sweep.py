"""Sweep files: what is valid, and the errors about the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import SpecError
from paceline.spec.option import Flag
from paceline.spec.sweep import in_order, load_sweep

HEAD = '[sweep]\nscript = "train.py"\n'


def write(folder: Path, text: str) -> Path:
    path = folder / "digits.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_every_kind_of_range(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """\
[sweep]
script = "train.py"
metric = "loss"
sampler = "tpe"
count = 10
[space]
lr = { log_uniform = [1e-5, 1] }
dropout = { uniform = [0, 0.5] }
width = { integer = [16, 64], step = 16 }
depth = { integer = [1, 100], log = true }
optimizer = ["adam", "sgd"]
momentum = { uniform = [0, 1], when = { optimizer = "sgd" } }
model.heads = [1, 2]
clip.min = [0.0]
clip.max = [1.0]
max_tokens = [512, 1024]
tokenizer = ["bpe", "word"]
epochs = 3
[job]
nodes = 2
""",
    )
    file = load_sweep(path)
    assert file.name == "digits"
    assert file.space == {
        "lr": {"log_uniform": [1e-5, 1.0]},
        "dropout": {"uniform": [0.0, 0.5]},
        "width": {"integer": [16, 64], "step": 16, "log": False},
        "depth": {"integer": [1, 100], "step": 1, "log": True},
        "optimizer": {"grid": ["adam", "sgd"]},
        "momentum": {"uniform": [0.0, 1.0], "when": {"optimizer": ["sgd"]}},
        "model.heads": {"grid": [1, 2]},
        "clip.min": {"grid": [0.0]},
        "clip.max": {"grid": [1.0]},
        "max_tokens": {"grid": [512, 1024]},
        "tokenizer": {"grid": ["bpe", "word"]},
        "epochs": {"grid": [3]},
    }
    assert file.tables == {"job": {"nodes": 2}}


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, HEAD + 'sampler = "random"\n[space]\nx = [1]\n')
    with pytest.raises(SpecError, match="needs a number of points") as refusal:
        load_sweep(path)
    assert "--count 20" in refusal.value.hint
    assert load_sweep(path, [Flag("--count", "count", 7)]).table.count == 7
    with pytest.raises(SpecError, match="Invalid --count 0: use at least 1"):
        load_sweep(path, [Flag("--count", "count", 0)])


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        (
            HEAD + 'metrik = "x"\n[space]\nx = [1]\n',
            r"Unknown key 'metrik' in \[sweep\]",
            "'metric'",
        ),
        (
            HEAD + "nodes = 2\n[space]\nx = [1]\n",
            r"Unknown key 'nodes' in \[sweep\]",
            "Move it to [job]",
        ),
        (HEAD + "[spase]\nx = [1]\n", "Unknown key 'spase'", "'space'"),
        *(
            (HEAD + f"[space]\nx = {{ {text} }}\n", "Unknown key", "")
            for text in (
                "unifrom = [0, 1]",
                "loguniform = [1e-4, 1]",
                "min = 0.0, max = 1.0",
                "low = 2, high = 8",
                'distribution = "normal", mu = 0',
                "value = 5",
                "values = [1, 2]",
                "choices = [1, 2]",
            )
        ),
        (HEAD + 'method = "random"\n[space]\nx = [1]\n', "Unknown key 'method'", ""),
        (HEAD + "grid = { x = [1] }\n", "Unknown key 'grid'", ""),
        (
            HEAD + '[space]\nhf_token = "abc"\n',
            r"\[space\] hf_token is a secret",
            "[environment] secrets",
        ),
        (
            HEAD + '[space]\ndb.password = ["a", "b"]\n',
            r"\[space\] db.password is a secret",
            ".env",
        ),
        (HEAD + '[space]\nx = ["http://ann:pw@host"]\n', r"\[space\] x is a secret", ".env"),
        (HEAD + "[space]\nx = { grid = [1], stap = 2 }\n", "Unknown key 'stap'", "'step'"),
        (HEAD + "[space]\nx = { log_uniform = [0, 1] }\n", "numbers above 0", ""),
        (
            HEAD + "[space]\nx = { uniform = [1, 0] }\n",
            "two numbers, a smaller and a larger one",
            "",
        ),
        (HEAD + "[space]\nx = { integer = [0.5, 2] }\n", "a whole number", ""),
        (
            HEAD + "[space]\nx = { uniform = [0, 1], step = 1 }\n",
            "step and log only with integer",
            "",
        ),
        (HEAD + "[space]\nx = []\n", "a list of values", ""),
        (HEAD + "[space]\nx = { uniform = [0, 1] }\n", "a grid needs values", "random"),
        (
            HEAD + "[space]\nx = [1]\ny = { grid = [1], when = { z = 1 } }\n",
            "Unknown key 'z'",
            "The keys are: x, y",
        ),
        ("[sweep]\n[space]\nx = [1]\n", "needs either a script or a module", "script ="),
        (HEAD, "has no .space. to search", "lr = "),
        (HEAD + 'prune = "median"\n[space]\nx = [1]\n', "needs a metric", "metric ="),
    ],
)
def test_errors_name_the_file(tmp_path: Path, text: str, message: str, hint: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(SpecError, match=message) as refusal:
        load_sweep(path)
    assert str(path) in refusal.value.message
    assert hint in refusal.value.hint


def test_keys_come_after_what_they_depend_on() -> None:
    space = {
        "a": {"grid": [1], "when": {"b": [1]}},
        "b": {"grid": [1], "when": {"c": [1]}},
        "c": {"grid": [1]},
    }
    assert in_order(space) == ["c", "b", "a"]
    with pytest.raises(SpecError, match="depend on each other"):
        in_order({"a": {"when": {"b": [1]}}, "b": {"when": {"a": [1]}}})
