"""The clusters of paceline.toml and of the user's clusters.toml."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline import cli
from paceline.cli.commands import login
from paceline.errors import SpecError, UsageError
from paceline.spec.clusters import ProjectFile, find_cluster, user_file
from paceline.spec.job import Program
from paceline.spec.load import load_job


@pytest.fixture
def own(guard: None, tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Write the user's clusters.toml."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
        user_file().parent.mkdir(parents=True)

        def write(text: str) -> Path:
            user_file().write_text(text, encoding="utf-8")
            return user_file()

        yield write


@pytest.fixture
def project_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Be in an empty project."""
    monkeypatch.chdir(tmp_path)
    return monkeypatch


@pytest.mark.parametrize(
    ("text", "key", "hint"),
    [
        ('hots = "login.alps"', "hots", "Did you mean 'host'?"),
        ('host = "login.alps"\nset_up = "module load x"', "set_up", "Did you mean 'setup'?"),
        ('host = "login.alps"\n[alps.job]\ntime = "1h"', "job", "Use one of host, python, setup."),
    ],
)
def test_an_unknown_key_of_the_users_file(
    own: Callable[[str], Path], text: str, key: str, hint: str
) -> None:
    file = own(f"[alps]\n{text}\n")
    with pytest.raises(SpecError) as raised:
        ProjectFile(None, {}).clusters()
    assert raised.value.message == f"Unknown key {key!r} in [alps] of {file}."
    assert hint in raised.value.hint


def test_an_unknown_key_of_a_profile(own: Callable[[str], Path], tmp_path: Path) -> None:
    file = tmp_path / "paceline.toml"
    file.write_text('[profiles.alps]\nhostname = "login.alps"\n')
    for attempt in (
        lambda: find_cluster("alps", ProjectFile.find(tmp_path)),
        lambda: load_job(Program("train.py"), cwd=tmp_path),
    ):
        with pytest.raises(SpecError) as raised:
            attempt()
        assert raised.value.message == f"Unknown key 'hostname' in [profiles.alps] of {file}."
        assert raised.value.hint.startswith("Did you mean 'host'?")


def test_a_cluster_without_a_host(own: Callable[[str], Path], tmp_path: Path) -> None:
    file = own('[alps]\npython = "/opt/python"\n[alpe]\nhost = "login.alpe"\n')
    with pytest.raises(UsageError, match="has no host") as raised:
        find_cluster("alps", ProjectFile(None, {}))
    assert raised.value.message == f"[alps] of {file} has no host."
    project = ProjectFile(
        tmp_path / "paceline.toml", {"profiles": {"alps": {"host": "login.alps"}}}
    )
    assert find_cluster("alps", project).python == "/opt/python"


def test_the_list_of_clusters(
    own: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    own(
        '[b]\nhost = "login.b"\n[a-long-name]\nhost = "ann@login.example.org"\n[c]\npython = "/opt/python"\n'
    )
    monkeypatch.chdir(tmp_path)
    assert login.command(show=True) == 0
    printed = capsys.readouterr().out
    assert [line.split(maxsplit=2) for line in printed.splitlines()] == [
        ["a-long-name", "ann@login.example.org", "not logged in"],
        ["b", "login.b", "not logged in"],
    ]


@pytest.mark.parametrize(
    ("typed", "key", "host"),
    [
        ("cedar", "cedar", "login.example.org"),
        ("ann@host.example", "alps", "ann@host.example"),
        ("login1.cedar.example.org", "alps", "login1.cedar.example.org"),
        ("my cluster", "my-cluster", "login.example.org"),
    ],
)
def test_an_unknown_cluster_gets_valid_toml(
    own: Callable[[str], Path], typed: str, key: str, host: str
) -> None:
    with pytest.raises(UsageError, match="There is no cluster") as raised:
        find_cluster(typed, ProjectFile(None, {}))
    assert f'\n    [profiles.{key}]\n    host = "{host}"\n' in raised.value.hint
    assert f"below [{key}]." in raised.value.hint


@pytest.mark.parametrize("line", [("ps", "--on", "all"), ("login",)])
def test_without_any_cluster_commands_say_what_to_write(
    own: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    line: tuple[str, ...],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"No cluster is configured|needs the name") as raised:
        cli.dispatch([*line])
    assert '\n    [profiles.alps]\n    host = "login.example.org"\n' in raised.value.hint


def test_the_empty_list_of_clusters_says_what_to_write(
    own: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert login.command(show=True) == 0
    assert '\n    [profiles.alps]\n    host = "login.example.org"\n' in capsys.readouterr().err


def test_keys_in_the_wrong_table_of_a_profile(own: Callable[[str], Path], tmp_path: Path) -> None:
    file = tmp_path / "paceline.toml"
    for text, hint in {
        'partition = "gpu"': "Move it to [profiles.alps.job].",
        'pyhton = "/opt/python"': "Did you mean 'python'?",
        '[profiles.alps.enviroment]\nkind = "venv"': "Did you mean 'environment'?",
        '[profiles.alps.job]\nscratch = "/scratch"': "Move it to [profiles.alps.project].",
    }.items():
        file.write_text(f'[profiles.alps]\nhost = "login.alps"\n{text}\n')
        with pytest.raises(SpecError) as raised:
            load_job(Program("train.py"), cwd=tmp_path)
        assert raised.value.hint.startswith(hint)
