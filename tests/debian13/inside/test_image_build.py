"""`paceline env build` with a real Apptainer: a folder as an image, and one with something installed into it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from tests.slurm.runs import Paceline

# A fake Python in an image small enough to build in seconds: it records what it should install.
PYTHON = '#!/bin/sh\necho "$*" >/asked\ncat /opt/paceline/requirements.txt >/installed\n'


def small_image(folder: Path) -> Path:
    """A shell, what removes files, what shows them, and the libraries that these need."""
    for name in (
        "bin",
        "usr/bin",
        "etc",
        "opt",
        "tmp",
        "proc",
        "sys",
        "dev",
        "root",
        "home",
        "var",
        "run",
    ):
        (folder / name).mkdir(parents=True)
    for name in ("sh", "rm", "cat"):
        program = shutil.which(name)
        assert program is not None
        shutil.copy(program, folder / "bin" / name)
        listed = subprocess.run(["ldd", program], text=True, capture_output=True, check=True).stdout
        for library in re.findall(r"/\S+", listed):
            target = folder / library.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(library, target)
    (folder / "usr/bin/python3").write_text(PYTHON)
    (folder / "usr/bin/python3").chmod(0o755)
    return folder


def shown(image: Path, path: str) -> str:
    return subprocess.run(
        ["apptainer", "--quiet", "exec", "--no-privs", image, "cat", path],
        text=True,
        capture_output=True,
        check=True,
    ).stdout


def test_an_image_from_a_folder_and_from_a_definition(
    tmp_path: Path, scratch: Path, paceline: Paceline
) -> None:
    # Apptainer wants every capability that root can have, which a namespace of users grants.
    commands = tmp_path / "bin"
    commands.mkdir()
    real = shutil.which("apptainer")
    (commands / "apptainer").write_text(f'#!/bin/sh\nexec unshare --map-root-user {real} "$@"\n')
    (commands / "apptainer").chmod(0o755)
    path = {"PATH": f"{commands}:/usr/bin:/bin:/usr/sbin:/sbin"}
    home = tmp_path / "project"
    home.mkdir()
    base = small_image(tmp_path / "base")
    config = f'[project]\nname = "p"\n[environment]\nkind = "container"\nbase = "{base}"\n'
    (home / "paceline.toml").write_text(config)
    paceline("env", "build", "--local", cwd=home, check=True, **path)
    (plain,) = scratch.glob("p/.environments/*/image.sif")
    assert shown(plain, "/usr/bin/python3") == PYTHON

    (home / "requirements.txt").write_text("tiny==1.0\n")
    (home / "constraints.txt").write_text("other<2\n")
    (home / "paceline.toml").write_text(config + 'requirements = "requirements.txt"\n')
    done = paceline("env", "build", "--local", cwd=home, check=True, **path)
    assert "runs that are submitted from now on use it" in done.stdout
    (made,) = set(scratch.glob("p/.environments/*/image.sif")) - {plain}
    assert shown(made, "/installed") == "tiny==1.0\n"
    assert "--constraint /opt/paceline/constraints.txt" in shown(made, "/asked")
    labels = subprocess.run(
        ["apptainer", "inspect", made], text=True, capture_output=True, check=True
    ).stdout
    assert f"paceline.base: {base}" in labels
    again = paceline("env", "build", "--local", cwd=home, check=True, **path)
    assert again.stdout.startswith("up to date")
