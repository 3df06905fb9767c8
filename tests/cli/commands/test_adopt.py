"""`paceline adopt`: scripts of many habits, and what becomes of them."""

from __future__ import annotations

import ast
import difflib
import os
import re
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from paceline.tools.adopt.script_changes import advise
from paceline.tools.adopt.source_edits import Source

CORPUS = Path(__file__).parents[2] / "tools" / "adopt" / "corpus"
Paceline = Callable[..., "subprocess.CompletedProcess[str]"]


def test_the_example_of_the_page() -> None:
    page = (Path(__file__).parents[3] / "docs" / "adopt.md").read_text(encoding="utf-8")
    block = re.search(r"^--- a/train.py\n.*?(?=^```)", page, flags=re.MULTILINE | re.DOTALL)
    assert block
    lines = block[0].splitlines()
    before = "\n".join(line[1:] for line in lines[3:] if not line.startswith("+")) + "\n"
    after = advise(Source(before, "train.py")).text.splitlines()
    diff = difflib.unified_diff(before.splitlines(), after, "a/train.py", "b/train.py", lineterm="")
    assert list(diff) == lines


def test_write_keeps_the_old_script(tmp_path: Path, paceline: Paceline) -> None:
    old = (CORPUS / "notebook.py").read_bytes()
    script, link = tmp_path / "real.py", tmp_path / "train.py"
    script.write_bytes(old)
    script.chmod(0o750)
    link.symlink_to(script)
    (tmp_path / "real.py.orig").write_text("somebody else's")
    shown = paceline("adopt", "train.py", check=True)
    assert "--- a/train.py" in shown.stdout
    assert "+run = paceline.start(seed=0)" in shown.stdout
    assert "to apply it: paceline adopt --write train.py" in shown.stdout
    assert script.read_bytes() == old
    done = paceline("adopt", "--write", "train.py", check=True)
    assert "the old one, with these line numbers, is" in done.stdout
    assert link.is_symlink()
    assert stat.S_IMODE(script.stat().st_mode) == 0o750
    assert b"paceline.start" in script.read_bytes()
    ast.parse(script.read_bytes())
    assert (tmp_path / "real.py.orig.2").read_bytes() == old
    assert (tmp_path / "real.py.orig").read_text() == "somebody else's"
    again = paceline("adopt", "--write", "train.py", check=True)
    assert "It already uses Paceline" in again.stdout
    assert sorted(os.listdir(tmp_path)) == ["real.py", "real.py.orig", "real.py.orig.2", "train.py"]


def test_line_numbers_are_those_of_the_script_as_it_was(tmp_path: Path, paceline: Paceline) -> None:
    script = tmp_path / "train.py"
    script.write_text(GUARDED)
    line = GUARDED.splitlines().index("    for epoch in range(first, 3):") + 1
    assert f"line {line}: nothing is resumed" in paceline("adopt", "train.py", check=True).stdout
    written = paceline("adopt", "--write", "train.py", check=True).stdout
    assert f"line {line}: nothing is resumed" in written
    assert "train.py.orig" in written
    module: dict[str, Any] = {"__name__": "train"}
    exec(script.read_text(), module)
    # as `train.run = paceline.start()` sets it
    module["run"] = SimpleNamespace(steps=lambda loader: iter(()))
    module["train"](None, None, None)


def test_write_tells_what_is_left(tmp_path: Path, paceline: Paceline) -> None:
    """A script that is changed in part is written, and the exit code says that it is not done."""
    script = tmp_path / "my train.py"
    script.write_bytes(
        (CORPUS / "numbered_epochs.py").read_bytes() + b"import shutil\nshutil.rmtree('x')\n"
    )
    shown = paceline("adopt", script.name, check=True)
    assert "to apply it: paceline adopt --write 'my train.py'" in shown.stdout
    assert "\nthen check it:\n  paceline run --nproc 2 'my train.py'\n" in shown.stdout
    script.chmod(0o444)
    refused = paceline("adopt", "--write", script.name)
    assert (refused.returncode, "is read-only" in refused.stderr) == (2, True), refused.stderr
    script.chmod(0o644)
    done = paceline("adopt", "--write", script.name)
    assert (done.returncode, "change these yourself:" in done.stdout) == (1, True)
    assert "paceline.start" in script.read_text()


def test_mistakes_on_the_command_line(tmp_path: Path, paceline: Paceline) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "broken.py").write_text("def (\x1b[31m")
    for name, message in {
        "none.py": "does not exist",
        "folder": "is a directory",
        "broken.py": "not valid",
    }.items():
        done = paceline("adopt", "--write", name)
        assert (done.returncode, message in done.stderr, "\x1b" in done.stderr) == (
            2,
            True,
            False,
        ), done.stderr
    assert sorted(os.listdir(tmp_path)) == ["broken.py", "folder"]


GUARDED = """\
import torch
from torch.utils.data import DataLoader


def train(model, loader, optimizer):
    for x, y in loader:
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def main(first):
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader([(torch.randn(8), torch.randn(1))] * 64, batch_size=8, drop_last=True)
    for epoch in range(first, 3):
        train(model, loader, optimizer)


if __name__ == "__main__":
    main(0)
"""
