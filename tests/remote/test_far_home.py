"""A home folder that is far away, where each file operation takes long: commands there need few of them."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.ssh.remote import start, unpack
from tests.remote.lab import Lab

Laptop = Callable[..., subprocess.CompletedProcess[str]]
# operations of a command with paths in the home folder; they were 1,050 when it read its modules one by one
FEW = 60

PART = "import importlib.resources as r\nVALUE = (r.files('thing') / 'a.txt').read_text()\n"
ENTRY = "import thing\ndef main():\n    print(thing.VALUE, thing.__file__)\n    return 7\nnote_end = print\n"


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("strace"), reason="strace counts the operations")
def test_a_command_there_opens_few_files(lab: Lab, laptop: Laptop, project: Path) -> None:
    counting = lab.home / "counting-python"
    counting.write_text(
        '#!/bin/sh\n[ -d "$2" ] || exec /usr/bin/python3 "$@"\n'
        f'exec strace -f -qq -e trace=%file -o {lab.home}/calls-"$3" /usr/bin/python3 "$@"\n'
    )
    counting.chmod(0o755)
    laptop("login", "plain", check=True)
    laptop("ps", "--on", "plain", check=True)
    # of a week
    lab.on_node(
        "mkdir -p .cache/paceline/submissions; cd .cache/paceline/submissions; touch $(seq 100)"
    )
    installed = next(
        path for path in (lab.home / ".cache/paceline").iterdir() if (path / start.MODULES).exists()
    )
    lab.on_node(f"{counting} -I {installed} receive </dev/null")
    calls = [
        line
        for line in (lab.home / "calls-receive").read_text().splitlines()
        if str(lab.home) in line
    ]
    assert 0 < len(calls) < FEW, "\n".join(calls)
    code = (
        f"import sys; sys.path.append({str(installed)!r}); import runpy;"
        f" runpy.run_path({str(installed / '__main__.py')!r})['import_from_one_file']({str(installed)!r});"
        " sys.argv = ['paceline', 'ps', '--help']; from paceline.__main__ import main; main()"
    )
    (lab.home / "code.py").write_text(code)
    lab.on_node(
        f"strace -f -qq -e trace=%file -o {lab.home}/calls-ps /usr/bin/python3 -I {lab.home}/code.py"
    )
    calls = [
        line for line in (lab.home / "calls-ps").read_text().splitlines() if str(lab.home) in line
    ]
    assert 0 < len(calls) < FEW, "\n".join(calls)


def test_files_are_written_many_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = tmp_path / "archive.zip"
    with zipfile.ZipFile(archive, "w") as out:
        for number in range(64):
            out.writestr(f"package/part{number % 4}/deep/module{number}.py", f"x = {number}\n")
    together, write = threading.Barrier(16, timeout=30), unpack.write

    def wait_for_others(path: str, content: bytes) -> None:
        together.wait()  # fails unless 16 are written at the same time
        write(path, content)

    monkeypatch.setattr(unpack, "write", wait_for_others)
    with zipfile.ZipFile(archive) as packed:
        unpack.extract(packed, str(tmp_path / "made"))
    assert len(list((tmp_path / "made").rglob("*.py"))) == 64


def test_modules_are_imported_from_one_file(tmp_path: Path) -> None:
    """Also with nothing else there; with that file damaged, they come from the folder."""
    archive, folder = tmp_path / "archive.zip", tmp_path / "made"
    with zipfile.ZipFile(archive, "w") as out:
        out.writestr("__main__.py", Path(start.__file__).read_bytes())
        out.writestr("thing/__init__.py", "from thing.part import VALUE\n")
        out.writestr(
            "thing/part.py",
            "import importlib.resources as r\nVALUE = (r.files('thing') / 'a.txt').read_text()\n",
        )
        out.writestr("thing/a.txt", "text")
        out.writestr("broken.py", "this is no python\n")
        for package in ("paceline", "paceline/cluster", "paceline/ssh", "paceline/ssh/remote"):
            out.writestr(f"{package}/__init__.py", "")
        out.writestr(
            "paceline/ssh/remote/entry.py",
            "import thing\ndef main():\n    print(thing.VALUE, thing.__file__)\n    return 7\nnote_end = print\n",
        )
    with zipfile.ZipFile(archive) as packed:
        unpack.extract(packed, str(folder))
        unpack.write_modules(packed, str(folder), str(folder))

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-I", str(folder)], text=True, capture_output=True, check=False
        )

    for path in ("thing/part.py", "thing/__init__.py"):
        (folder / path).rename(folder / f"{path}.away")
    done = run()
    assert (done.returncode, done.stdout) == (7, f"text {folder}/thing/__init__.py\n"), done.stderr
    for path in ("thing/part.py", "thing/__init__.py"):
        (folder / f"{path}.away").rename(folder / path)
    (folder / start.MODULES).write_bytes((folder / start.MODULES).read_bytes()[:-20])
    done = run()
    assert (done.returncode, done.stdout) == (7, f"text {folder}/thing/__init__.py\n"), done.stderr
