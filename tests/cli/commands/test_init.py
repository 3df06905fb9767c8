"""`paceline init --on`: what a cluster says about itself becomes settings of its jobs, and nothing else."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import dispatch, on_cluster
from paceline.cli.commands.init import ClusterFacts
from paceline.errors import ConnectionProblem
from paceline.slurm.partitions import NodeKind, Partition
from paceline.ssh.connection import Answer
from tests.ssh.local_connection import HERE

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

BEFORE = '[profiles.alps]\nhost = "login.alps"\n'
EVIL = '"\n[notify]\ncommand = "touch x"\n\x1b]52;c;eA==\x07\r\x7f\u2028\u202e\ud800 \'\'\' """'
FACTS = {
    "version": "24.05",
    "requeues": False,
    "partitions": {"gpu": "2 nodes"},
    "partition": "gpu",
    "time": "1-00:00:00",
    "gpus_per_node": 4,
    "cpus_per_gpu": 8,
    "gpu_types": ["a100", "h100"],
    "interfaces": ["ib0"],
}
JOB = {"partition": "gpu", "gpus_per_node": 4, "cpus_per_gpu": 8, "time": "1-00:00:00"}


@pytest.fixture
def init(guard: None, tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """`init --on alps` with an answer of the cluster; returns paceline.toml."""
    file = tmp_path / "paceline.toml"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        patch.setenv("HOME", str(tmp_path))

        def call(answer: bytes, *args: str, before: str = BEFORE) -> Path:
            file.write_bytes(before.encode())
            patch.setattr(on_cluster, "call", lambda _: (HERE, Answer(0, answer, "")))
            assert dispatch(["init", "--on", "alps", *args]) == 0
            return file

        yield call


def load(file: Path) -> dict[str, Any]:
    return tomllib.loads(file.read_bytes().decode())


def test_a_profile_has_what_the_cluster_says(init: Callable[..., Path]) -> None:
    assert load(init(json.dumps(FACTS).encode())) == {
        "profiles": {"alps": {"host": "login.alps", "job": JOB}}
    }


@pytest.mark.parametrize("key", ["version", "partitions", "partition", "gpu_types", "interfaces"])
def test_no_text_of_a_cluster_becomes_a_setting(
    init: Callable[..., Path], capsys: pytest.CaptureFixture[str], key: str
) -> None:
    """Otherwise it could name a command that runs on the laptop."""
    evil: Any = (
        {EVIL: EVIL}
        if key == "partitions"
        else EVIL
        if isinstance(FACTS[key], str)
        else [EVIL, EVIL]
    )
    answer = json.dumps({**FACTS, key: evil, "notify": {"command": "touch x"}}).encode()
    found = load(init(answer))
    assert set(found) == {"profiles"}
    assert (
        found["profiles"]["alps"]["job"]
        .pop("partition")
        .startswith('"' if key == "partition" else "gpu")
    )
    assert found["profiles"] == {
        "alps": {
            "host": "login.alps",
            "job": {name: value for name, value in JOB.items() if name != "partition"},
        }
    }
    capsys.readouterr()
    init(answer, "--print")
    assert all(line.isprintable() for line in capsys.readouterr().out.split("\n"))


@pytest.mark.parametrize(
    "answer",
    [
        b'\n[notify]\ncommand = "touch x"\n',
        b"",
        b"[]",
        b"{}",
        b"\xff",
        b"[" * 100_000,
        *(
            json.dumps({**FACTS, **each}).encode()
            for each in (
                {"time": "tomorrow"},
                {"time": '1"\n[notify]'},
                {"gpus_per_node": "4"},
                {"gpus_per_node": True},
                {"cpus_per_gpu": 0},
                {"partition": ""},
                {"partitions": {"gpu": 1}},
                {"gpu_types": "a100"},
            )
        ),
    ],
)
def test_an_answer_that_is_no_list_of_facts(
    init: Callable[..., Path], tmp_path: Path, answer: bytes
) -> None:
    with pytest.raises(
        ConnectionProblem, match="alps gave an answer that Paceline does not understand"
    ):
        init(answer)
    assert (tmp_path / "paceline.toml").read_text() == BEFORE


def test_a_file_keeps_its_line_endings_its_link_and_its_permissions(
    init: Callable[..., Path], tmp_path: Path
) -> None:
    real = tmp_path / "shared" / "settings.toml"
    real.parent.mkdir()
    real.touch(mode=0o600)
    (tmp_path / "paceline.toml").symlink_to("shared/settings.toml")
    file = init(json.dumps(FACTS).encode(), before=BEFORE.replace("\n", "\r\n"))
    assert os.readlink(file) == "shared/settings.toml"
    assert real.read_bytes().count(b"\r\n") == real.read_bytes().count(b"\n") > 10
    assert real.stat().st_mode & 0o777 == 0o600
    assert os.listdir(real.parent) == ["settings.toml"]
    assert load(file)["profiles"]["alps"]["job"] == JOB


def test_what_a_cluster_sends_is_what_the_laptop_reads() -> None:
    kind = NodeKind(2, 32, 1000, {"a100": 4}, (), "idle")
    found = ClusterFacts.find(
        [Partition("gpu", kinds=[kind])], {"SLURM_VERSION": "24.05", "JobRequeue": "0"}
    )
    assert (found.partition, found.gpus_per_node, found.cpus_per_gpu, found.requeues) == (
        "gpu",
        4,
        8,
        False,
    )
    assert ClusterFacts.read(json.dumps(vars(found)).encode()) == found
