"""Scripts that know nothing of Paceline give the same results as under the program that they were written for."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Completed
from tests.guests.guests import (
    BY_NAME,
    GUESTS,
    SCRIPTS,
    Guest,
    results,
    run_paceline,
    run_peer,
    variables,
)
from tests.until import until

Peer = Callable[[Guest], dict[str, str]]
STOPPED = 75  # the exit code of a run that was stopped


@pytest.fixture(scope="session")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Peer:
    """Return what the ranks of a guest write under torchrun, python or mpirun. Each guest runs there once."""
    known: dict[str, dict[str, str]] = {}

    def run(guest: Guest) -> dict[str, str]:
        if guest.name not in known:
            known[guest.name] = run_peer(guest, tmp_path_factory.mktemp(guest.name) / "out")
        return known[guest.name]

    return run


# Kinds of scripts that other tests run too: below, test_exit_paths, test_frameworks, tests/slurm, tests/agent/workers.
ALSO_ELSEWHERE = {
    "ddp_tutorial",
    "two_groups",
    "never_destroys",
    "config_groups",
    "lightning_trainer",
    "fabric_loop",
    "flat_script",
    "hf_trainer",
    "mp_spawn",
    "accelerate_loop",
    "reads_stdin",
}


@pytest.mark.parametrize(
    "guest",
    [
        pytest.param(
            guest, id=guest.name, marks=pytest.mark.slow if guest.name in ALSO_ELSEWHERE else ()
        )
        for guest in GUESTS
    ],
)
def test_same_results_in_the_usual_style(guest: Guest, peer: Peer, tmp_path: Path) -> None:
    expected = peer(guest)
    assert set(expected) == {"rank-0", "rank-1"}
    assert all(text.startswith("2 ") for text in expected.values()), (
        "the peer did not train on two ranks"
    )
    assert run_paceline(guest, guest.styles[0], tmp_path / "out") == expected


OTHERS = [(guest, style) for guest in GUESTS for style in guest.styles[1:]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("guest", "style"), OTHERS, ids=[f"{guest.name}-{style}" for guest, style in OTHERS]
)
def test_same_results_in_other_styles(guest: Guest, style: str, peer: Peer, tmp_path: Path) -> None:
    assert run_paceline(guest, style, tmp_path / "out") == peer(guest)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("guest", GUESTS, ids=lambda guest: guest.name)
def test_the_same_again_and_again(guest: Guest, peer: Peer, tmp_path: Path) -> None:
    for number in range(5):
        assert run_paceline(guest, guest.styles[0], tmp_path / str(number) / "out") == peer(guest)


@pytest.mark.parametrize("style", ["fork", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_stopped_in_the_middle_and_started_again(style: str, peer: Peer, tmp_path: Path) -> None:
    """A script with its own snapshot resumes from it; `paceline run` exits with 75, so that nothing follows it."""
    guest = BY_NAME["ddp_tutorial"]
    out = tmp_path / "out"
    out.mkdir()
    environment = variables(
        PACELINE_SCRATCH=str(tmp_path / "scratch"), HOLD="1", GATE=str(tmp_path / "gate")
    )
    command = [sys.executable, "-m", "paceline", "run", "--cpu", "--nproc", "2", "--style", style]
    with open(tmp_path / "console", "w+b") as console:
        first = subprocess.Popen(
            [*command, guest.script, str(out)],
            cwd=SCRIPTS,
            env=environment,
            stdout=console,
            stderr=console,
            stdin=subprocess.DEVNULL,
        )
        text = (tmp_path / "console").read_text
        until(lambda: "epoch 1 done" in text() or first.poll() is not None, details=text)
        assert first.poll() is None, text()
        first.send_signal(signal.SIGTERM)
        assert first.wait(60) == STOPPED, (tmp_path / "console").read_text()
    assert (
        "progress since the script's own last checkpoint is lost"
        in (tmp_path / "console").read_text()
    )
    assert not results(out)
    again = subprocess.run(
        [*command, guest.script, str(out)],
        cwd=SCRIPTS,
        env={**environment, "HOLD": ""},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=120,
    )
    assert again.returncode == 0, again.stderr
    assert "epoch 0 done" not in again.stdout, "it started over"
    assert results(out) == peer(guest)


@pytest.mark.slow  # tests/agent/health/test_independence.py has the same hint
def test_a_script_that_starts_its_own_processes_gets_a_hint(
    paceline: Callable[..., Completed], tmp_path: Path
) -> None:
    """Two ranks start two processes each, and all of them want the same port."""
    guest = BY_NAME["mp_spawn"]
    never = str(tmp_path / "never")
    done = paceline(
        "run", "--cpu", "--nproc", "2", guest.script, str(tmp_path), cwd=SCRIPTS, HOLD=never
    )
    assert done.returncode not in (0, STOPPED)
    assert "--style spawn" in done.stderr
