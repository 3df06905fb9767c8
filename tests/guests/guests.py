"""The guests: scripts that know nothing of Paceline, what starts them elsewhere, and how to run them both ways."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.ports import free_port

SCRIPTS = Path(__file__).with_name("scripts")
BIN = Path(sys.executable).parent

TORCHRUN, PYTHON, MPIRUN = "torchrun", "python", "mpirun"


@dataclass(frozen=True)
class Guest:
    """One script, and the styles that apply to it: the first is the one that people would use."""

    name: str
    args: tuple[str, ...] = ("OUT",)  # OUT is the folder for its results
    styles: tuple[str, ...] = ("fork", "torchrun")
    peer: str = TORCHRUN
    answer: str = ""  # what standard input holds

    @property
    def script(self) -> str:
        return str(SCRIPTS / f"{self.name}.py")

    def args_for(self, out: Path) -> list[str]:
        return [arg.replace("OUT", str(out)) for arg in self.args]


GUESTS = (
    Guest("ddp_tutorial"),
    Guest("flat_script", ("--out_dir=OUT", "--max_iters=3")),
    Guest("config_groups", ("out=OUT", "lr=0.05")),
    Guest("two_groups"),
    Guest("never_destroys"),
    Guest("forks_workers"),
    Guest("reads_stdin", answer="3\n"),
    Guest("mp_spawn", styles=("spawn",), peer=PYTHON),
    Guest("accelerate_loop", styles=("accelerate", "fork", "torchrun")),
    Guest("lightning_trainer", styles=("lightning", "fork", "torchrun")),
    Guest("fabric_loop", styles=("lightning", "fork", "torchrun")),
    Guest("hf_trainer"),
)
# `paceline run` has no mpirun style
ON_CLUSTERS = (*GUESTS, Guest("mpi4py_sum", styles=("mpirun",), peer=MPIRUN))
BY_NAME = {guest.name: guest for guest in ON_CLUSTERS}


def variables(**more: str) -> dict[str, str]:
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "FIXED_PORT": str(free_port()),
        "COLUMNS": "120",
        **more,
    }


def run_peer(guest: Guest, out: Path) -> dict[str, str]:
    """Run a guest with the program that its users have today; return what each rank wrote."""
    command = {
        TORCHRUN: [str(BIN / "torchrun"), "--nproc-per-node=2", f"--master-port={free_port()}"],
        PYTHON: [sys.executable],
        MPIRUN: ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", sys.executable],
    }[guest.peer]
    for attempt in range(
        3
    ):  # ranks of torch alone sometimes abort or hang at exit: docs/upstream/gloo-exit-deadlock.md
        out.mkdir(parents=True)
        problem = _run_peer(command, guest, out)
        if not problem:
            return results(out)
        out.rename(out.with_name(f"out-{attempt}"))
    raise AssertionError(f"{guest.name}: {problem}")


def _run_peer(command: list[str], guest: Guest, out: Path) -> str:
    """Return what went wrong."""
    with open(out.parent / "peer.log", "w+") as log:
        process = subprocess.Popen(
            [*command, guest.script, *guest.args_for(out)],
            cwd=SCRIPTS,
            env=variables(),
            text=True,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            problem = _wait_for_results(process, out, answer=guest.answer)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        log.seek(0)
        return f"{problem}\n{log.read()}" if problem else ""


def _wait_for_results(process: subprocess.Popen[str], out: Path, *, answer: str) -> str:
    """Return what went wrong. Ranks of torch sometimes deadlock at exit: if their results are there, end them."""
    assert process.stdin
    with suppress(BrokenPipeError), process.stdin as answers:
        answers.write(answer)
    deadline = time.monotonic() + 300
    while process.poll() is None and len(results(out)) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    try:
        code = process.wait(20)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait(60)
        return "" if len(results(out)) == 2 else "it did not end"
    return f"exit {code}" if code else ""


def run_paceline(guest: Guest, style: str, out: Path, *options: str) -> dict[str, str]:
    """Run a guest under `paceline run`; return what each rank wrote."""
    command = [
        sys.executable,
        "-m",
        "paceline",
        "run",
        "--cpu",
        "--nproc",
        "2",
        "--style",
        style,
        *options,
    ]
    return _run([*command, guest.script, *guest.args_for(out)], guest, out)


def _run(command: list[str], guest: Guest, out: Path) -> dict[str, str]:
    out.mkdir(parents=True)
    environment = variables(PACELINE_SCRATCH=str(out.parent / "scratch"))
    done = subprocess.run(
        command,
        cwd=SCRIPTS,
        env=environment,
        input=guest.answer,
        text=True,
        capture_output=True,
        timeout=300,
    )
    assert done.returncode == 0, (
        f"{guest.name}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    )
    return results(out)


def results(out: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in sorted(out.glob("rank-*"))}
