"""The clusters of paceline.toml and of the user's clusters.toml."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.cli import login
from paceline.cluster.ssh.clusters import ProjectFile, find_cluster, user_file
from paceline.errors import SpecError, UsageError
from paceline.spec import Program, load_job


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


@pytest.mark.parametrize(
    ("text", "key", "hint"),
    [
        ('hots = "login.alps"', "hots", "Did you mean 'host'?"),
        ('host = "login.alps"\nset_up = "module load x"', "set_up", "Did you mean 'setup'?"),
        ('host = "login.alps"\n[alps.job]\ntime = "1h"', "job", "[profiles.alps] of paceline.toml"),
    ],
)
def test_an_unknown_key_of_the_users_file(own: Callable[[str], Path], text: str, key: str, hint: str) -> None:
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
    assert "paceline reference profiles" in raised.value.hint


def test_a_cluster_without_a_host(own: Callable[[str], Path], tmp_path: Path) -> None:
    file = own('[alps]\npython = "/opt/python"\n[alpe]\nhost = "login.alpe"\n')
    with pytest.raises(UsageError, match="has no host") as raised:
        find_cluster("alps", ProjectFile(None, {}))
    assert raised.value.message == f"[alps] of {file} has no host."
    project = ProjectFile(tmp_path / "paceline.toml", {"profiles": {"alps": {"host": "login.alps"}}})
    assert find_cluster("alps", project).python == "/opt/python"


def test_the_list_of_clusters_is_aligned(
    own: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own('[b]\nhost = "login.b"\n[a-long-name]\nhost = "ann@login.example.org"\n[c]\npython = "/opt/python"\n')
    monkeypatch.chdir(tmp_path)
    assert login.command(show=True) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines() == [
        "a-long-name  ann@login.example.org  not logged in",
        "b            login.b                not logged in",
    ]
    assert "[c] of" in printed.err
