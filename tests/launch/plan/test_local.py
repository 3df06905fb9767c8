"""Plans of runs on this machine: pure, so that a table of cases is enough."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.redaction import redact_args
from paceline.errors import SpecError, UsageError
from paceline.launch.launch_spec import run_record
from paceline.launch.local_run import LocalPlan, Machine, plan_local
from paceline.spec.job import Program
from paceline.spec.load import load_job
from paceline.spec.option import Flag
from paceline.spec.run_path import RunPath, new_run_id
from paceline.spec.shell_text import command_line, quote

LAPTOP = Machine(cores=8, gpus=0)
SERVER = Machine(cores=64, gpus=4)
SITE = RunPath(Path("/scratch"), "project", "default", "20300101-000000-abcd")


def plan(
    folder: Path,
    machine: Machine,
    *flags: tuple[str, str, Any],
    text: str = "",
    old: LaunchSpec | None = None,
    **more: Any,
) -> LocalPlan:
    (folder / "paceline.toml").write_text(text)
    job = load_job(
        Program("train.py", ("--lr", "0.1")),
        flags=[Flag(*flag) for flag in flags],
        cwd=folder,
        **more,
    )
    return plan_local(job, run_path=SITE, machine=machine, python="/usr/bin/python3", old=old)


NPROC = "--nproc", "launch.nproc"
NODES = "--nodes", "job.nodes"
CPU = ("--cpu", "runtime.cpu", True)


@pytest.mark.parametrize(
    ("machine", "flags", "expected"),
    [
        (LAPTOP, [], (1, 2, 0, 4)),
        (LAPTOP, [(*NPROC, 4)], (1, 4, 0, 2)),
        (LAPTOP, [(*NPROC, 32)], (1, 32, 0, 1)),
        (LAPTOP, [(*NODES, 2), (*NPROC, 2)], (2, 2, 0, 2)),
        (SERVER, [], (1, 4, 4, 16)),
        (SERVER, [(*NODES, 2)], (2, 2, 2, 16)),
        (SERVER, [CPU], (1, 2, 0, 32)),
        (SERVER, [CPU, (*NPROC, 8)], (1, 8, 0, 8)),
    ],
)
def test_shapes(
    machine: Machine, flags: list[Any], expected: tuple[int, ...], tmp_path: Path
) -> None:
    launch_spec = plan(tmp_path, machine, *flags).launch_spec
    assert (launch_spec.nodes, launch_spec.nproc, launch_spec.gpus, launch_spec.threads) == expected


def test_more_ranks_than_gpus_is_an_error_that_names_the_flag(tmp_path: Path) -> None:
    with pytest.raises(
        SpecError, match="--nproc asks for 5 ranks, but this machine has 4 GPUs"
    ) as caught:
        plan(tmp_path, SERVER, (*NPROC, 5))
    assert "--cpu" in caught.value.hint


def test_nodes_in_the_file_apply_to_the_cluster_only(tmp_path: Path) -> None:
    assert plan(tmp_path, LAPTOP, text="[job]\nnodes = 16").launch_spec.nodes == 1


def test_styles(tmp_path: Path) -> None:
    completed = ("--style", "launch.style", "srun")
    with pytest.raises(SpecError, match="needs a Slurm allocation"):
        plan(tmp_path, LAPTOP, completed)
    from_file = plan(tmp_path, LAPTOP, text='[launch]\nstyle = "srun"')
    assert from_file.launch_spec.style == "fork"
    assert "so this run uses fork" in from_file.notes[0]
    on_mac = plan(tmp_path, replace(LAPTOP, system="Darwin"))
    assert on_mac.launch_spec.style == "spawn"
    assert "uses spawn on Darwin" in on_mac.notes[0]
    assert (
        plan(tmp_path, LAPTOP, ("--style", "launch.style", "torchrun")).launch_spec.style
        == "torchrun"
    )


def test_the_launch_spec_is_complete(tmp_path: Path) -> None:
    text = """
[environment.variables]
A = "x,y"
[runtime]
precision = "bf16"
timeout = "10m"
[checkpoint]
every_steps = 50
keep_last = 3
[resume]
max_attempts = 4
hang_timeout = "5m"
[params]
lr = 0.1
"""
    launch_spec = plan(tmp_path, LAPTOP, text=text).launch_spec
    assert launch_spec.program == str(tmp_path / "train.py")
    assert launch_spec.args == ["--lr", "0.1"]
    assert launch_spec.variables == {"A": "x,y"}
    assert launch_spec.runtime == {
        "precision": "bf16",
        "timeout": 600,
        "save_every_steps": 50,
        "keep_last": 3,
    }
    assert (launch_spec.max_restarts, launch_spec.hang_timeout, launch_spec.params) == (
        3,
        300.0,
        {"lr": 0.1},
    )
    assert LaunchSpec.from_json(launch_spec.to_json()) == launch_spec


def test_each_node_has_an_agent_with_its_index(tmp_path: Path) -> None:
    agents = plan(tmp_path, LAPTOP, (*NODES, 3)).agents
    assert [starter.variables["PACELINE_AGENT"] for starter in agents] == ["0/3", "1/3", "2/3"]
    assert {starter.argv for starter in agents} == {
        ("/usr/bin/python3", agents[0].variables["PYTHONPATH"])
    }, "another Python finds the run half in the run folder"


def test_nodes_on_one_machine_share_its_gpus(tmp_path: Path) -> None:
    named = replace(SERVER, devices=("7", "5", "3", "1"))
    for machine, expected in ((SERVER, ["0,1", "2,3"]), (named, ["7,5", "3,1"])):
        agents = plan(tmp_path, machine, (*NODES, 2)).agents
        assert [starter.variables["CUDA_VISIBLE_DEVICES"] for starter in agents] == expected
    assert "CUDA_VISIBLE_DEVICES" not in plan(tmp_path, SERVER).agents[0].variables
    assert plan(tmp_path, SERVER, CPU).launch_spec.variables == {"CUDA_VISIBLE_DEVICES": ""}


def test_a_resumed_run_keeps_its_number_of_ranks(tmp_path: Path) -> None:
    old = plan(tmp_path, LAPTOP, (*NPROC, 4), CPU).launch_spec
    new = plan(tmp_path, LAPTOP, ("--max-steps", "runtime.max_steps", 9), old=old).launch_spec
    assert (new.nodes, new.nproc, new.threads) == (1, 4, 2)
    fewer = plan(tmp_path, LAPTOP, (*NPROC, 1), old=old).launch_spec
    assert (fewer.nproc, fewer.threads) == (1, 8)


def test_run_ids_sort_by_time_and_differ() -> None:
    assert len({new_run_id() for _ in range(50)}) > 45
    assert new_run_id()[:2] == "20"


def test_secrets_in_arguments_of_sbatch_are_hidden_in_the_record(tmp_path: Path) -> None:
    """A local run does not use them, so nobody has checked them."""
    extra = ["--export=API_KEY=hush", "--switches=1"]
    job = load_job(
        Program("train.py"), flags=[Flag("--sbatch-arg", "job.extra", extra)], cwd=tmp_path
    )
    text = run_record(
        job,
        run_path=SITE,
        launch_spec=LaunchSpec("r", "train.py", []),
        command=[],
        backend="local",
        code={},
    )
    assert json.loads(text)["spec"]["job"]["extra"] == ["--export=API_KEY=***", "--switches=1"]


def test_a_secret_that_is_set_nowhere_is_an_error_if_typed(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="--secret names NOPE_X, which is not set here"):
        plan(tmp_path, LAPTOP, ("--secret", "environment.secrets", ["NOPE_X"]))
    assert plan(tmp_path, LAPTOP, text='[environment]\nsecrets = ["NOPE_X"]').notes == ()


def test_secrets_on_the_command_line_are_hidden() -> None:
    args = [
        "paceline",
        "run",
        "--env",
        "API_KEY=abc",
        "--env=MY_TOKEN=x=y",
        "--env",
        "A=1",
        "t.py",
        "KEY=2",
    ]
    assert redact_args(args) == [
        "paceline",
        "run",
        "--env",
        "API_KEY=***",
        "--env=MY_TOKEN=***",
        "--env",
        "A=1",
        "t.py",
        "KEY=2",
    ]


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.text(st.characters(blacklist_characters="\0", blacklist_categories=["Cs"])), max_size=20
    )
)
def test_bash_reads_quoted_arguments_back(args: list[str]) -> None:
    line = command_line(["printf", "%s\\0", *args])
    assert "\n" not in line
    done = subprocess.run(["bash", "-c", line], capture_output=True, check=True)
    assert done.stdout == b"".join(os.fsencode(word) + b"\0" for word in args or [""])


def test_bytes_that_are_not_text_are_quoted_and_stored_too(tmp_path: Path) -> None:
    word = os.fsdecode(b"a\xff\n'b")
    done = subprocess.run(
        ["bash", "-c", f"printf %s {quote(word)}"], capture_output=True, check=True
    )
    assert done.stdout == b"a\xff\n'b"
    launch_spec = replace(plan(tmp_path, LAPTOP).launch_spec, args=[word])
    assert LaunchSpec.from_json(launch_spec.to_json().encode().decode()).args == [word]


def test_no_shell_can_pass_a_nul() -> None:
    with pytest.raises(UsageError, match="NUL"):
        quote("a\0b")
