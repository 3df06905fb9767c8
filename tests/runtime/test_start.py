"""`paceline.start`: the session of a flat script ends with the process, however that ends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import paceline
from paceline.errors import UsageError
from tests.forked_ranks import Ranks
from tests.runtime.models import net
from tests.runtime.training.test_wrap import quiet

TRAIN = """
import atexit, os, signal, sys, threading, time
import torch, paceline

run = paceline.start(cpu=True, folder=".", seed=0)
model = run.wrap(torch.nn.Linear(2, 2))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
run.resume(model=model, opt=opt)
for step in run.steps(range({steps})):
    run.backward(model(torch.ones(3, 2)).sum())
    run.update(opt)
    {within}
print("after the loop")
{after}
"""


def train(within: str = "pass", after: str = "", steps: int = 3) -> str:
    return TRAIN.format(within=within, after=after, steps=steps)


NO_THREADS = """
def refuse(thread):
    raise RuntimeError("can't create new thread at interpreter shutdown")

atexit.register(setattr, threading.Thread, "start", refuse)  # as Python 3.12 does
"""
CAUGHT = "exec('try: sys.exit(3)\\nexcept SystemExit: pass')"
LAUNCHED = """
import sys
from pathlib import Path
from paceline.agent.workers.bootstrap import run_rank
from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.run_folder import RunFolder

Path("train.py").write_text({script!r})
attempt = RunFolder(Path(".")).attempt(1)
run_rank(LaunchSpec("run", "train.py", []), attempt, "", rank=0, local_rank=0)
"""


def launched(script: str) -> str:
    """Run a script as an agent's rank."""
    return LAUNCHED.format(script=script)


HOOK = "sys.excepthook = lambda *error: print('my hook:', error[1]); 1 / 0"
FINALLY = """
try:
    1 / 0
finally:
    run.end()
"""
CHILD = """
if os.fork() == 0:
    sys.exit(4)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 4
assert not os.path.exists("checkpoints/step-00000003")
"""
INTERACTIVE = """
sys.ps1 = ">>> "
sys.last_value = ValueError("shown")
sys.excepthook(ValueError, sys.last_value, None)
"""
TWICE = """
try:
    paceline.start(cpu=True)
except paceline.PacelineError as error:
    print(error)
run.end()
assert sys.exit.__module__ == "sys" and sys.excepthook is sys.__excepthook__
assert not torch.distributed.is_initialized() and os.path.exists("checkpoints/step-00000003/complete.json")
paceline.start(cpu=True, report=False)
"""
STOP = "os.kill(os.getpid(), signal.SIGTERM) if step == 5 and run.rank == 1 else time.sleep(0.001)"
# name: (ranks, script, exit codes, the steps that are saved, what rank 0 prints, what it doesn't)
CASES = {
    "end": (2, train(after=NO_THREADS), [0, 0], [3], "done in", "Traceback"),
    "error": (1, train(within="1 / 0"), [1], [], "ZeroDivisionError", "after the loop"),
    "exit_0": (1, train(after="sys.exit(0)"), [0], [3], "done in", "Traceback"),
    "exit_1": (1, train(after="exit('no data')"), [1], [], "no data", "done in"),
    "caught": (
        2,
        train(within=f"{CAUGHT} if step < 2 else None"),
        [0, 0],
        [3],
        "done in",
        "Traceback",
    ),
    "rank_caught": (1, launched(train(after=CAUGHT)), [0], [3], "done in", "Traceback"),
    "rank_exit": (
        1,
        launched(train(after="raise SystemExit(3)")),
        [3],
        [],
        "after the loop",
        "done in",
    ),
    "hook": (1, train(within=HOOK), [1], [], "my hook: division by zero", "done in"),
    "rank_hook": (1, launched(train(within=HOOK)), [1], [], "my hook: division by zero", "done in"),
    "finally": (
        1,
        train(after=FINALLY),
        [1],
        [],
        "was called during a ZeroDivisionError",
        "done in",
    ),
    "interrupt": (
        1,
        train(after="signal.raise_signal(signal.SIGINT)"),
        [-2],
        [],
        "KeyboardInterrupt",
        "done in",
    ),
    "stop": (
        2,
        train(within=STOP, steps=100_000),
        [0, 0],
        None,
        "stopped at step",
        "after the loop",
    ),
    "child": (1, train(after=CHILD), [0], [3], "done in", "Traceback"),
    "interactive": (1, train(after=INTERACTIVE), [0], [3], "ValueError: shown", "Error: a"),
    "twice": (1, train(after=TWICE), [0], [3], "already open", "Traceback"),
    "at_exit": (
        1,
        train(after="run._save_at_end = lambda: 1 / 0"),
        [1],
        [],
        "ZeroDivisionError",
        "done in",
    ),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[int]]]:
    """The folder and the exit codes of all scripts."""
    folder = tmp_path_factory.mktemp("flat")
    scripts = json.dumps([[name, case[0], case[1]] for name, case in CASES.items()])
    done = subprocess.run(
        [sys.executable, "-m", "tests.runtime.flat_scripts", str(folder)],
        cwd=Path(__file__).parents[2],
        input=scripts,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CASES)
def test_a_flat_script_ends_as_a_with_block_does(
    finished: tuple[Path, dict[str, list[int]]], name: str
) -> None:
    folder, codes = finished
    _, _, expected, saved, printed, not_printed = CASES[name]
    log = (folder / name / "rank-0.log").read_text()
    assert codes[name] == expected, log
    assert printed in log
    assert not_printed not in log
    steps = [
        int(path.parent.name[5:]) for path in folder.glob(f"{name}/checkpoints/*/complete.json")
    ]
    assert steps == saved if saved is not None else len(steps) == 1 and steps[0] > 5


def start_in_a_child(folder: str, fail: bool) -> None:
    run = paceline.start(cpu=True, report=False, folder=folder)
    model = run.wrap(net())
    run.resume(model=model)
    for _ in run.steps(range(3)):
        pass
    if fail:
        raise ValueError("boom")


@pytest.mark.parametrize("fail", [False, True])
def test_a_child_of_multiprocessing_ends_its_session(
    ranks: Ranks, tmp_path: Path, fail: bool
) -> None:
    """Such processes run neither atexit's functions nor sys.excepthook."""
    process = ranks.context.Process(target=start_in_a_child, args=(str(tmp_path), fail))
    process.start()
    process.join(90)
    assert process.exitcode == int(fail)
    assert (tmp_path / "checkpoints/step-00000003/complete.json").exists() is not fail


def test_end_belongs_to_start() -> None:
    with quiet() as run, pytest.raises(UsageError, match="for sessions that"):
        run.end()
