"""Paceline on the login node: complete or absent, whatever happens while it is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.ssh import installation
from tests.remote.lab import Lab

Laptop = Callable[..., subprocess.CompletedProcess[str]]


def installed(lab: Lab) -> Path:
    (found,) = [path.parent for path in (lab.home / ".cache/paceline").glob("*/complete")]
    return found


@pytest.mark.slow  # test_forward.py installs, and so do the tests below
def test_two_laptops_at_once(lab: Lab, laptop: Laptop, project: Path) -> None:
    laptop("login", "plain", check=True)
    cache = lab.uninstall()
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "paceline", "ps", "--on", "plain", "--json"],
            cwd=project,
            text=True,
            env={**os.environ, **lab.variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for _ in range(2)
    ]
    for process in started:
        output, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        assert '"runs"' in output
    assert (installed(lab) / "paceline" / "cli" / "commands" / "ps.py").is_file()
    assert not list(cache.glob("*.partial-*"))


def test_an_installation_that_lost_files_is_made_again(lab: Lab, laptop: Laptop) -> None:
    """As sites do with files of caches that nobody has used for weeks. All are counted once a day."""
    laptop("login", "plain", check=True)
    lab.uninstall()
    laptop("ps", "--on", "plain", check=True)
    folder = installed(lab)
    (folder / "paceline" / "py.typed").unlink(missing_ok=True)
    (folder / "paceline" / "errors.py").unlink()
    os.utime(folder / "complete", (0, 0))
    assert "installing Paceline" in laptop("ps", "--on", "plain", check=True).stderr
    assert (folder / "paceline" / "errors.py").is_file()
    os.utime(folder / "complete", (0, 0))
    assert "installing" not in laptop("ps", "--on", "plain", check=True).stderr


def test_packages_of_an_index_and_of_this_machines_pip(
    lab: Lab, laptop: Laptop, project: Path, tmp_path: Path
) -> None:
    """If this machine's packages do not fit, pip there installs them; if it cannot, pip here downloads them."""
    fake = lab.home / "fake"
    fake.mkdir(exist_ok=True)
    here = Path(installation.__file__).parents[2]
    packages = Path(sys.prefix, "lib").glob("python*/site-packages")
    described = '["%s", [3, 11], "riscv64", "linux", ["glibc", "2.36"]]' % (fake / "python")
    (fake / "python").write_text(
        f"#!/bin/sh\ncase \"$*\" in *libc_ver*) echo '{described}';; *'-m pip'*)\n"
        'for each in "$@"; do [ "$last" = --target ] && to=$each; last=$each; done\n'
        f'echo "$@" >>{fake}/asked; cp -r {next(packages)}/. "$to";;\n'
        '*) exec /usr/bin/python3 "$@";; esac\n'
    )
    (fake / "python").chmod(0o755)
    subprocess.run(["chmod", "-R", "a+rX", str(here)], check=False)
    (project / "paceline.toml").write_text(
        f'[profiles.plain]\nhost = "plain"\npython = "{fake}/python"\n'
    )
    laptop("login", "plain", check=True)
    subprocess.run(["chown", "-R", lab.user, str(fake)], check=True)
    done = laptop("ps", "--on", "plain")
    if "Permission denied" in done.stderr:
        pytest.skip("the user there cannot read the packages of this Python")
    assert done.returncode == 0, done.stderr
    assert "pydantic" in (fake / "asked").read_text()


def test_a_python_that_is_too_old_is_explained(lab: Lab, laptop: Laptop, project: Path) -> None:
    old = lab.home / "old python"
    old.write_text(
        '#!/bin/sh\necho \'["/old/python3", [3, 9], "x86_64", "linux", ["glibc", "2.28"]]\'\n'
    )
    old.chmod(0o755)
    (project / "paceline.toml").write_text(
        '[profiles.plain]\nhost = "plain"\npython = "~/old python"\n'
    )
    laptop("login", "plain", check=True)
    done = laptop("ps", "--on", "plain")
    assert done.returncode == 1
    assert "needs Python 3.10 or newer on plain, and found /old/python3 (3.9)" in done.stderr
    assert 'setup = "module load python"' in done.stderr
    (project / "paceline.toml").write_text(
        '[profiles.plain]\nhost = "plain"\npython = "/no/such"\n'
    )
    assert "There is no Python '/no/such' on plain" in laptop("ps", "--on", "plain").stderr


def test_commands_of_the_profile_come_first(lab: Lab, laptop: Laptop, project: Path) -> None:
    """As `module load python` does; what they print is no part of the answer."""
    setup = "echo loading; PATH=$HOME/tools:$PATH; export SCRATCH=$HOME/big"
    profile = f'[profiles.plain]\nhost = "plain"\nsetup = "{setup}"\npython = "my-python"\n'
    (project / "paceline.toml").write_text(profile)
    (lab.home / "tools").mkdir(exist_ok=True)
    tool = lab.home / "tools" / "my-python"
    tool.unlink(missing_ok=True)
    tool.symlink_to("/usr/bin/python3")
    laptop("login", "plain", check=True)
    done = laptop("ps", "--on", "plain", "--json", check=True)
    assert f'"{lab.home}/big/paceline"' in done.stdout
    assert "loading" not in done.stdout
    assert not laptop("ps", "--on", "plain", "--json", check=True).stderr


@pytest.mark.parametrize(
    ("commands", "code", "said"),
    [
        ("echo first; no-such-command --x", 127, "no-such-command: not found"),
        pytest.param("echo ready\nexit 3", 3, "ready", marks=pytest.mark.slow),
        pytest.param("echo 'never closed", 2, "Unterminated quoted string", marks=pytest.mark.slow),
    ],
)
def test_commands_of_the_profile_that_fail(
    request: pytest.FixtureRequest, project: Path, commands: str, code: int, said: str
) -> None:
    """Before Paceline is there, and later."""
    lab, laptop = request.getfixturevalue("lab"), request.getfixturevalue("laptop")
    file = lab.home / f"setup-{code}.sh"
    (project / "paceline.toml").write_text(
        f'[profiles.plain]\nhost = "plain"\nsetup = ". {file}"\n'
    )
    laptop("login", "plain", check=True)
    for _ in range(2):
        file.write_text(f"{commands}\n")
        done = laptop("ps", "--on", "plain")
        assert done.returncode == 1
        assert f"`setup` of plain failed with exit code {code}" in done.stderr
        assert said in done.stderr
        file.write_text("true\n")
        laptop("ps", "--on", "plain", check=True)


@pytest.mark.slow  # the commands of a profile load them: the tests above
def test_modules_are_known_to_the_profile(lab: Lab, laptop: Laptop, project: Path) -> None:
    """Over ssh, the shell has not read what defines `module`."""
    if not any(map(os.path.exists, ("/etc/profile.d/lmod.sh", "/etc/profile.d/modules.sh"))):
        pytest.skip("no modules here: install lmod")
    (lab.home / "modulefiles").mkdir(exist_ok=True)
    (lab.home / "modulefiles" / "big").write_text(f"#%Module\nsetenv SCRATCH {lab.home}/big\n")
    setup = "module use $HOME/modulefiles; module load big"
    (project / "paceline.toml").write_text(f'[profiles.plain]\nhost = "plain"\nsetup = "{setup}"\n')
    laptop("login", "plain", check=True)
    done = laptop("ps", "--on", "plain", "--json", check=True)
    assert f'"{lab.home}/big/paceline"' in done.stdout
