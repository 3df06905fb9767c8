"""Plant secrets of every kind for a run, and search output, files and processes for leaks."""

from __future__ import annotations

import hashlib
import json
import secrets
import threading
import time
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

# Each rank reports digests of its secrets and waits; then rank 1 fails.
SCRIPT = """\
import hashlib, json, os, pathlib, time
names = json.loads(pathlib.Path("names.json").read_text())
digests = {name: hashlib.sha256(os.environ.get(name, "").encode()).hexdigest() for name in names}
pathlib.Path(f"report-{os.environ['RANK']}.json").write_text(json.dumps(digests))
while not pathlib.Path("go").exists():
    time.sleep(0.05)
if os.environ["RANK"] == "1":
    raise RuntimeError("rank 1 fails, so that failure reports are searched too")
time.sleep(60)
"""
CONFIG = '[environment]\nsecrets = ["NAMED_SECRET"]\n'


@dataclass(frozen=True)
class PlantedSecrets:
    """A project and a home folder with a secret of every kind."""

    project: Path
    home: Path
    values: dict[str, str]  # by the variable's name

    @property
    def variables(self) -> dict[str, str]:
        """The environment of the command."""
        return {"HOME": str(self.home), "NAMED_SECRET": self.values["NAMED_SECRET"]}

    @property
    def args(self) -> list[str]:
        """Arguments, including a secret."""
        return ["--env", f"TYPED_TOKEN={self.values['TYPED_TOKEN']}", "train.py"]

    def digests(self) -> dict[str, str]:
        return {
            name: hashlib.sha256(text.encode()).hexdigest() for name, text in self.values.items()
        }


def plant_secrets(folder: Path) -> PlantedSecrets:
    names = ("FROM_DOTENV", "FROM_SECRETS_ENV", "WANDB_API_KEY", "NAMED_SECRET", "TYPED_TOKEN")
    values = {name: f"hush-{secrets.token_hex(8)}" for name in names}
    values["FROM_DOTENV"] += ' it\'s "odd"\nand has two lines'
    made = PlantedSecrets(folder / "project", folder / "home", values)
    made.project.mkdir()
    quoted = values["FROM_DOTENV"].replace('"', '\\"')
    _write(made.project / ".env", f'# of the project\nFROM_DOTENV="{quoted}"\n')
    _write(
        made.home / ".config/paceline/secrets.env",
        f"export FROM_SECRETS_ENV={values['FROM_SECRETS_ENV']} # mine\n",
    )
    _write(
        made.home / ".netrc",
        f"machine api.wandb.ai login user password {values['WANDB_API_KEY']}\n",
    )
    (made.project / "train.py").write_text(SCRIPT)
    (made.project / "paceline.toml").write_text(CONFIG)
    (made.project / "names.json").write_text(json.dumps(names))
    return made


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o600)


def in_text(text: str, values: Mapping[str, str]) -> list[str]:
    """Return the names of secrets in a text, complete or by one of their lines."""
    return [name for name, value in values.items() if value.splitlines()[0][:21] in text]


def in_files(folder: Path, values: Mapping[str, str]) -> dict[str, list[str]]:
    """Return files below a folder (also in archives) that contain a secret."""
    found = {}
    for path in folder.rglob("*"):
        if not path.is_file():
            continue
        try:
            texts = [path.read_bytes()]
            if zipfile.is_zipfile(path):
                with zipfile.ZipFile(path) as archive:
                    texts += [archive.read(name) for name in archive.namelist()]
        except OSError:
            continue  # removed meanwhile
        shown = {name for text in texts for name in in_text(text.decode(errors="replace"), values)}
        if shown:
            found[str(path)] = sorted(shown)
    return found


@dataclass
class CommandLines:
    """Every command line of any process on this machine, as sampled."""

    seen: set[str] = field(default_factory=set)

    def scan(self) -> None:
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                self.seen.add(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
            except OSError:
                continue


@contextmanager
def watch_command_lines() -> Iterator[CommandLines]:
    lines, over = CommandLines(), threading.Event()

    def watch() -> None:
        while not over.is_set():
            lines.scan()
            time.sleep(0.1)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield lines
    finally:
        over.set()
        thread.join()
