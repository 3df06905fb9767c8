"""Secret files: what is parsed, which value wins, what is rejected. Errors never quote a value."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import PacelineError, SpecError
from paceline.launch.secrets import FROM_SHELL, Secrets, choose_secrets, parse_dotenv, read_secrets
from paceline.spec.job import Job, Program
from paceline.spec.load import load_job
from paceline.spec.option import Flag

HUSH = "hush-4c1d"
Write = Callable[..., Path]

GOOD = {
    "A=1": "1",
    "export A=1": "1",
    "  A = one two  ": "one two",
    "A=": "",
    "A=x#y": "x#y",
    "A=x=#y": "x=#y",
    "A= 'x'": "x",
    "A=x # note": "x",
    "A= # nothing": "",
    "A='x # $HOME \\n'  # note": "x # $HOME \\n",
    'A="x\\ty\\n\\"z\\" \\$HOME \\d"': 'x\ty\n"z" $HOME \\d',
    'A="first\nsecond"': "first\nsecond",
    'A={"json": [1, "two"]}': '{"json": [1, "two"]}',
    "A=pa$$word": "pa$$word",
    "# a comment\n\nB=2\nA=last\n": "last",
    "A=1\nA=2": "2",
    "A='${B}'": "${B}",
    "A=https://example.org/?a=b&c=d#e": "https://example.org/?a=b&c=d#e",
}
BAD = {
    HUSH: (1, "not of the form NAME=value"),
    f"A=1\n\n# fine\n1B={HUSH}": (4, "not of the form NAME=value"),
    f"A-B={HUSH}": (1, "not of the form NAME=value"),
    f"A=1\nB='{HUSH}": (2, "each quote closed"),
    f"A='x'{HUSH}": (1, "each quote closed"),
    f'A= "{HUSH}': (1, "each quote closed"),
    f"A= '{HUSH}'x'": (1, "each quote closed"),
    f"A={HUSH}${{B}}": (1, "does not expand"),
    f'A="{HUSH}$(pwd)"': (1, "does not expand"),
    f"A=`{HUSH}`": (1, "does not expand"),
    f"A='1\n2'\nB={HUSH}\0": (3, "not of the form"),
}


@pytest.mark.parametrize("text", GOOD)
def test_valid_lines(text: str) -> None:
    assert parse_dotenv(text, where=".env")["A"] == GOOD[text]


@pytest.mark.parametrize("text", BAD)
def test_invalid_lines_are_named_by_number_but_never_quoted(text: str) -> None:
    line, why = BAD[text]
    with pytest.raises(SpecError, match=why) as caught:
        parse_dotenv(text, where="/p/.env")
    assert caught.value.message.startswith(f"Line {line} of /p/.env ")
    assert HUSH not in str(caught.value)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    return folder


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "paceline.toml").write_text("")
    return folder


def write(path: Path, text: str, *, mode: int = 0o600) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)
    return path


def job_in(project: Path, **environment: Any) -> Job:
    flags = [Flag(f"--{key}", f"environment.{key}", value) for key, value in environment.items()]
    return load_job(Program("train.py"), flags=flags, cwd=project)


def read(
    project: Path, home: Path, environ: Mapping[str, str] | None = None, **environment: Any
) -> Secrets:
    return read_secrets(job_in(project, **environment), {"HOME": str(home), **(environ or {})})


def test_earlier_files_win_and_sources_are_named(project: Path, home: Path) -> None:
    write(project / ".env", "A=project\nB=project\n")
    write(home / ".config/paceline/secrets.env", "B=user\nC=user\n")
    write(home / ".netrc", "machine api.wandb.ai login user password 0123abcd\n")
    found = read(project, home)
    assert dict(found.values) == {
        "A": "project",
        "B": "project",
        "C": "user",
        "WANDB_API_KEY": "0123abcd",
    }
    assert found.describe() == (
        "A (.env), B (.env), C (~/.config/paceline/secrets.env), WANDB_API_KEY (~/.netrc)"
    )
    assert "0123abcd" not in repr(found)


def test_xdg_config_home_is_respected(project: Path, home: Path, tmp_path: Path) -> None:
    write(tmp_path / "config/paceline/secrets.env", "A=there\n")
    found = read(project, home, {"XDG_CONFIG_HOME": str(tmp_path / "config")})
    assert dict(found.values) == {"A": "there"}


def test_a_file_of_windows(project: Path, home: Path) -> None:
    (project / ".env").write_bytes(
        "\ufeff# a comment\r\n\r\nB='two\r\nlines'\r\nA=last\r\n".encode()
    )
    (project / ".env").chmod(0o600)
    assert dict(read(project, home).values) == {"A": "last", "B": "two\nlines"}


NETRC = """\
machine api.wandb.ai
  login user
  password cloud
machine wandb.example.org login user password ours
machine github.com login me password never
"""


@pytest.mark.parametrize(
    ("address", "key"),
    [
        (None, "cloud"),
        ("https://wandb.example.org:8080/x", "ours"),
        ("https://other.example.org", None),
    ],
)
def test_netrc_key_matches_the_wandb_server(
    project: Path, home: Path, address: str | None, key: str | None
) -> None:
    write(home / ".netrc", NETRC)
    if address:
        write(project / ".env", f"WANDB_BASE_URL={address}\n")
    assert read(project, home).values.get("WANDB_API_KEY") == key


def test_netrc_key_matches_the_server_of_wandb_login(project: Path, home: Path) -> None:
    """`wandb login --host` writes the address to a file, which ranks read too."""
    write(home / ".netrc", NETRC)
    write(home / ".config/wandb/settings", "[default]\nbase_url = https://wandb.example.org:8080\n")
    assert dict(read(project, home).values) == {"WANDB_API_KEY": "ours"}


def test_a_wandb_key_in_the_shell_is_always_used(project: Path, home: Path) -> None:
    environ = {"WANDB_API_KEY": "mine"}
    for files in ({}, {"secret_files": []}):
        found = read(project, home, environ, **files)
        assert (dict(found.values), found.describe()) == (environ, f"WANDB_API_KEY ({FROM_SHELL})")


def test_a_wandb_key_keeps_its_server_address(project: Path, home: Path) -> None:
    write(home / ".netrc", NETRC)
    address = {"WANDB_BASE_URL": "https://wandb.example.org:8080"}
    assert dict(read(project, home, address).values) == {"WANDB_API_KEY": "ours", **address}
    assert dict(read(project, home, address, variables={"WANDB_API_KEY": "mine"}).values) == address
    (home / ".netrc").unlink()
    assert not read(project, home, address).values  # without a key there is nothing to protect


def test_an_invalid_netrc_is_an_error_only_if_it_names_the_wandb_server(
    project: Path, home: Path
) -> None:
    """Other programs may know keywords that Python's parser does not."""
    write(home / ".netrc", f"machine github.com login me password {HUSH} unknown words\n")
    assert not read(project, home).values
    write(home / ".netrc", f"machine api.wandb.ai login me password {HUSH} unknown words\n")
    with pytest.raises(
        PacelineError, match=r"Cannot read the secrets in ~/\.netrc: line 1"
    ) as caught:
        read(project, home)
    assert HUSH not in str(caught.value)


def test_netrc_variable_is_respected(project: Path, home: Path, tmp_path: Path) -> None:
    write(tmp_path / "my-netrc", NETRC)
    assert dict(read(project, home, {"NETRC": str(tmp_path / "my-netrc")}).values) == {
        "WANDB_API_KEY": "cloud"
    }


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o660, 0o644])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("project/.env", f"A={HUSH}"),
        ("home/.config/paceline/secrets.env", f"A={HUSH}"),
        ("home/.netrc", f"machine api.wandb.ai login user password {HUSH}"),
    ],
)
def test_a_file_that_others_can_read_is_rejected(
    project: Path, home: Path, tmp_path: Path, *, name: str, text: str, mode: int
) -> None:
    path = write(tmp_path / name, text, mode=mode)
    with pytest.raises(PacelineError, match=rf"its mode is {mode:04o}, expected 0600") as caught:
        read(project, home)
    assert caught.value.hint == f"Run: chmod 600 {path}"
    assert path.name in caught.value.message
    assert HUSH not in str(caught.value)


def test_files_without_secrets_for_us_may_be_public(project: Path, home: Path) -> None:
    write(home / ".netrc", "machine github.com login me password never", mode=0o644)
    write(home / ".config/paceline/secrets.env", "# nothing yet\n", mode=0o644)
    (project / ".env").mkdir()  # a virtual environment
    assert not read(project, home).values
    # Its key is not needed, so the file is not read.
    write(home / ".netrc", NETRC, mode=0o644)
    found = read(project, home, {"WANDB_API_KEY": "mine"})
    assert (found.values["WANDB_API_KEY"], found.sources["WANDB_API_KEY"]) == ("mine", FROM_SHELL)
    assert not read(project, home, variables={"WANDB_API_KEY": "mine"}).values


def test_secret_files_replaces_the_default_files(project: Path, home: Path) -> None:
    write(project / ".env", "A=unread\n", mode=0o644)
    write(project / "conf/prod.env", "A=1\n")
    write(home / "more", "A=2\nB=2\n")
    found = read(project, home, secret_files=["conf/prod.env", "~/more"])
    assert dict(found.values) == {"A": "1", "B": "2"}
    assert not read(project, home, secret_files=[]).values
    with pytest.raises(SpecError, match=r"names nothing\.env, which does not exist"):
        read(project, home, secret_files=["nothing.env"])


def test_pipes_and_binary_files_are_rejected(project: Path, home: Path) -> None:
    os.mkfifo(project / ".env", 0o600)
    with pytest.raises(PacelineError, match="it is not a regular file"):
        read(project, home)
    (project / ".env").unlink()
    (project / ".env").write_bytes(b"A=\xff\xfe\n")
    with pytest.raises(PacelineError, match="it is not UTF-8 text"):
        read(project, home)


def test_shell_variables_win(project: Path, home: Path) -> None:
    filed = Secrets(
        {"A": "file", "B": "file", "UID": "1000"}, {"A": ".env", "B": ".env", "UID": ".env"}
    )
    environ = {"A": "shell", "C": "shell", "D": "not requested"}
    found = choose_secrets(job_in(project, secrets=["B", "C"]), environ=environ, file_secrets=filed)
    assert dict(found.values) == {"A": "shell", "B": "file", "C": "shell"}
    assert dict(found.sources) == {"A": FROM_SHELL, "B": ".env", "C": FROM_SHELL}


def test_names_used_by_the_batch_script_are_rejected(project: Path) -> None:
    filed = Secrets({"paceline_run": "x"}, {"paceline_run": ".env"})
    with pytest.raises(
        SpecError, match=r"\.env sets paceline_run, a name that batch scripts use themselves"
    ):
        choose_secrets(job_in(project), environ={}, file_secrets=filed)
    found = choose_secrets(job_in(project), environ={}, file_secrets=filed, in_a_job=False)
    assert found.values == {"paceline_run": "x"}


def test_a_value_in_place_of_a_name_is_not_quoted(project: Path) -> None:
    with pytest.raises(SpecError, match="'A_KEY', which is not a variable name") as caught:
        choose_secrets(
            job_in(project, secrets=[f"A_KEY={HUSH}"]),
            environ={},
            file_secrets=Secrets(),
            in_a_job=False,
        )
    assert HUSH not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            f'variables = {{ "A-KEY" = "{HUSH}" }}',
            "variables = {A-KEY} in .*: use letters, digits and _",
        ),
        (
            f'variables = {{ A_KEY = ["{HUSH}"] }}',
            "variables = {A_KEY} in .*: use a string without NUL characters or a number for A_KEY",
        ),
        (f'secrets = {{ A_KEY = "{HUSH}" }}', "secrets = {A_KEY} in .*: use a list of strings"),
    ],
)
def test_config_errors_do_not_quote_values(project: Path, text: str, message: str) -> None:
    (project / "paceline.toml").write_text(f"[environment]\n{text}\n")
    with pytest.raises(SpecError, match=message) as caught:
        job_in(project)
    assert HUSH not in str(caught.value)
