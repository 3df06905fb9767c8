"""The runs of a soak: submit one of random shape, see how far it is, and judge how it ended."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch

from paceline.contract.files import own_folder_name
from paceline.contract.foreign_records import read_objects
from paceline.contract.launcher_variables import expand
from paceline.contract.run_folder import DONE, DONE_UNSAVED, FAILED, RunFolder
from paceline.slurm.job_states import WAITING
from paceline.watch.records import Record
from paceline.watch.run_status import LOST
from tests.fault_tolerance.runs import STEPS, Training
from tests.slurm.runs import run_of

SCRIPT = Path(__file__).with_name("train.py")
DISK = "4g"  # each run folder is on a file system of its own, so that it can be full
# seconds in which nothing moves; `paceline ps` names a dead job and its remedy before that
STUCK = 420.0
# seconds without a change of state or step, after which to look for smaller signs of life
QUIET = 60.0
LOOK_EVERY = 20.0  # seconds
# share of the time in which a thread has or wants a core; those that poll want one more rarely
AT_WORK = 0.5
WAITS_FOR_NODES = ("Resources", "Priority", "ReqNodeNotAvail", "Nodes required")  # Slurm's reasons
EXACT, VERDICT, DEFECT, UNFINISHED = "exact", "verdict", "defect", "unfinished"
OUTCOMES = (EXACT, VERDICT, DEFECT, UNFINISHED)
REMEDY = re.compile(
    r"(?:no sign of life from .*|.*held[^;]*); use `((?:scontrol (?:requeue|release)|scancel) [\d_]+)`"
)


@dataclass(frozen=True)
class Shape:
    nodes: int
    nproc: int
    style: str
    partition: str
    pause: float  # seconds per step

    @classmethod
    def choose(cls, rng: random.Random) -> Shape:
        nodes, nproc = rng.choice([(1, 1), (1, 1), (1, 2), (2, 1)])
        style = rng.choice(["fork"] * 6 + ["srun", "torchrun"])
        partition = rng.choice(["main", "main", "low", "grace"])
        return cls(nodes, nproc, style, partition, round(rng.uniform(2.0, 4.0), 2))

    @property
    def world_size(self) -> int:
        return self.nodes * self.nproc

    def __str__(self) -> str:
        return f"{self.nodes} x {self.nproc} {self.style} in {self.partition}"


class Disk:
    """The file system of one run: a tmpfs, which is full once it may not grow. Without root it is a plain folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True)
        self.mounted = os.geteuid() == 0
        if self.mounted:
            subprocess.run(
                ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "paceline-soak", str(path)],
                check=True,
            )

    def fill(self) -> None:
        """Leave no space. What is written meanwhile may need another try."""
        for _ in range(20):
            usage = os.statvfs(self.path)
            if self._resize(str((usage.f_blocks - usage.f_bfree) * usage.f_frsize)):
                return

    def free(self) -> None:
        if self.mounted and self.path.is_mount():
            self._resize(DISK)

    def _resize(self, size: str) -> bool:
        done = subprocess.run(
            ["mount", "-o", f"remount,size={size}", str(self.path)], capture_output=True
        )
        return done.returncode == 0

    def remove(self) -> None:
        if self.mounted and self.path.is_mount():
            subprocess.run(["umount", "--lazy", str(self.path)], check=False)
        shutil.rmtree(self.path, ignore_errors=True)


@contextlib.contextmanager
def shared_disks(folder: Path) -> Iterator[None]:
    """A folder in which nodes that start from now on see what is mounted later."""
    folder.mkdir(parents=True)
    if os.geteuid():
        yield
        return
    subprocess.run(["mount", "--bind", str(folder), str(folder)], check=True)
    try:
        subprocess.run(["mount", "--make-shared", str(folder)], check=True)
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@dataclass
class SoakRun:
    """A submitted run, what was done to it, and what became of it."""

    number: int
    shape: Shape
    home: Path
    disk: Disk
    folder: RunFolder
    record: Record | None = None
    faults: list[str] = field(default_factory=list)
    outcome: str = ""
    reason: str = ""
    step_at_fault: int | None = None
    changed: float = field(default_factory=time.monotonic)
    ended: float | None = None
    requeued_by_hand: bool = False
    _last: object = None
    _looked: float = -LOOK_EVERY
    _newest: int = 0
    _wanted: dict[int, float] = field(default_factory=dict)

    @classmethod
    def submit(cls, number: int, shape: Shape, base: Path) -> SoakRun:
        home = base / "runs" / f"{number:04d}"
        for name in ("out", "tmp"):
            (home / name).mkdir(parents=True)
        disk = Disk(base / "disks" / f"{number:04d}")
        options = [
            "--nodes",
            shape.nodes,
            "--nproc",
            shape.nproc,
            "--cpu",
            "--style",
            shape.style,
            "--partition",
            shape.partition,
            "--time",
            "60m",
            "--grace",
            "100s",
            "--hang-timeout",
            "180s",
            "--no-snapshot",
            "--mem-per-gpu",
            "100M",
            "--name",
            f"soak-{number}",
            "--env",
            f"TMPDIR={home / 'tmp'}",
        ]
        args = ["--out", home / "out", "--pause", shape.pause]
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "paceline",
                "submit",
                *map(str, options),
                str(SCRIPT),
                *map(str, args),
            ],
            cwd=home,
            env={**os.environ, "PACELINE_SCRATCH": str(disk.path)},
            text=True,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=300,
        )
        if done.returncode:
            disk.remove()
            raise RuntimeError(f"paceline submit failed:\n{done.stdout}\n{done.stderr}")
        return cls(number, shape, home, disk, run_of(done))

    # -- where it is -----------------------------------------------------------------------------------

    @property
    def job(self) -> str:
        return self.record.job or "" if self.record else ""

    @property
    def hosts(self) -> list[str]:
        """The nodes on which it runs now."""
        state = self.record.state if self.record else None
        return (
            expand(state.nodes)
            if state is not None and state.state == "RUNNING" and state.nodes
            else []
        )

    @property
    def step(self) -> int:
        """The last step in the metrics of rank 0; 0 before the first one."""
        return (self.record.latest.step if self.record else None) or 0

    def ranks(self) -> list[tuple[str, int]]:
        """The node and the pid there of each rank."""
        return _read_pairs(path.read_text() for path in sorted((self.home / "out").glob("where-*")))

    def agents(self) -> list[tuple[str, int]]:
        """The node and the pid there of each agent, the head agent first."""
        found = []
        for path in sorted(self.folder.events.glob("agent-*.jsonl")):
            started = [event for event in read_objects(path) if event.get("event") == "started"]
            found += [f"{started[-1]['host']} {started[-1]['pid']}"] if started else []
        return _read_pairs(found)

    def update(self, record: Record) -> bool:
        """Take note of the newest record, and return whether the run is over."""
        self.record = record
        now = time.monotonic()
        claims = len(list(self.folder.claims.glob("*")))
        seen = (record.status, record.attempts, record.latest.step, claims)
        if seen != self._last:
            self._last, self.changed, self.ended = seen, now, now if record.is_over else None
        # A job that goes back into the queue may look ended for a moment, and its processes take a moment to end.
        return self.ended is not None and now - self.ended > 10

    def take_remedy(self) -> list[str]:
        """Return the command that `paceline ps` names for a run that is dead or held, once; else an empty one."""
        found = REMEDY.match(self.record.detail) if self.record is not None else None
        if found is None or self.requeued_by_hand:
            return []
        self.requeued_by_hand = True
        return found[1].split()

    @property
    def is_stuck(self) -> bool:
        """Whether nothing moves: no state, step, event, log or checkpoint, and no thread has work to do.

        A machine that is too busy for a run makes it slow, not stuck. Nor is a job stuck that waits for nodes.
        """
        now = time.monotonic()
        if now - self.changed < QUIET or now - self._looked < LOOK_EVERY:
            return False
        newest, wanted = self._newest_file(), _core_seconds(self._processes())
        enough = AT_WORK * (now - self._looked)
        works = any(
            seconds - self._wanted.get(thread, seconds) >= enough
            for thread, seconds in wanted.items()
        )
        state = self.record.state if self.record else None
        waits = (
            state is not None
            and state.phase == WAITING
            and state.reason.startswith(WAITS_FOR_NODES)
        )
        if waits or works or newest != self._newest:
            self.changed = now
        self._looked, self._newest, self._wanted = now, newest, wanted
        return now - self.changed > STUCK

    def _newest_file(self) -> int:
        """Return when the run last wrote to a file, in nanoseconds. The use of its nodes says nothing about it."""
        newest = 0
        for folder, folders, names in os.walk(self.folder.path):
            if self.folder.system.name in folders:
                folders.remove(self.folder.system.name)
            for path in [folder, *(os.path.join(folder, name) for name in names)]:
                with contextlib.suppress(OSError):
                    newest = max(newest, os.lstat(path).st_mtime_ns)
        return newest

    @property
    def has_recovered(self) -> bool:
        """Whether it has trained since its last fault, if any."""
        return self.step != self.step_at_fault

    # -- how it ended ----------------------------------------------------------------------------------

    def judge(self, undisturbed: Training) -> None:
        """Decide what its end counts as."""
        assert self.record is not None
        status, cause = self.record.status, self.cause()
        if left := self.processes():
            self.outcome, self.reason = DEFECT, f"{status}, but processes are left: {left}"
        elif status in (DONE, DONE_UNSAVED):
            difference = self.compare(undisturbed)
            self.outcome, self.reason = (DEFECT, difference) if difference else (EXACT, "")
        elif status in (FAILED, LOST) and cause:
            self.outcome, self.reason = VERDICT, cause
        else:
            self.outcome, self.reason = DEFECT, f"ended as {status}: {cause or 'no cause is named'}"

    def cause(self) -> str:
        """What `paceline ps` says about a run that is over; a node alone is no cause."""
        assert self.record is not None
        nodes = self.record.state.nodes if self.record.state is not None else ""
        return "" if self.record.detail == nodes else self.record.detail

    def compare(self, undisturbed: Training) -> str:
        """Return how its losses and weights differ from those of the undisturbed run; empty if not at all."""
        ours = Training.__new__(Training)
        ours.out = self.home / "out"
        expected = {rank: dict(rows) for rank, rows in undisturbed.losses().items()}
        for rank, rows in ours.losses().items():
            if wrong := [step for step, loss in rows if expected[rank][step] != loss]:
                return f"the loss of rank {rank} differs at step {wrong[0]}"
            if {step for step, _ in rows} != set(range(1, STEPS + 1)):
                return f"rank {rank} skipped steps"
        try:
            weights = ours.weights()
        except OSError as problem:
            return f"no weights: {problem}"
        different = [
            name
            for name, tensor in undisturbed.weights().items()
            if not torch.equal(weights[name], tensor)
        ]
        return f"weights differ: {', '.join(different)}" if different else ""

    def processes(self) -> list[str]:
        """Its processes on any node."""
        found = []
        for process in self._processes():
            with contextlib.suppress(psutil.Error):
                found.append(f"{process.pid} {' '.join(process.cmdline())[:100]}")
        return found

    def _processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("PACELINE_RUN") == str(self.folder.path):
                    found.append(process)
        return found

    def temporary_files(self) -> list[str]:
        """What it has left in its temporary folder: files, sockets, and folders.

        Paceline's own empty folder may stay, and torch's cache of compiled code, which it makes when it is imported.
        """
        folder = self.home / "tmp"
        entries = [path for path in sorted(folder.rglob("*")) if path.name != own_folder_name()]
        found = [
            path
            for path in entries
            if not path.relative_to(folder).parts[0].startswith("torchinductor_")
        ]
        return [str(path.relative_to(self.home)) for path in found]

    def keep(self, kept: Path) -> None:
        """Copy everything that may explain a defect."""
        folder = kept / f"{self.number:04d}"
        shutil.copytree(self.home, folder, symlinks=True, dirs_exist_ok=True)
        self.disk.free()
        shutil.copytree(self.folder.path, folder / "run", symlinks=True, dirs_exist_ok=True)

    def remove(self) -> None:
        self.disk.remove()
        shutil.rmtree(self.home, ignore_errors=True)


def _core_seconds(processes: Iterable[psutil.Process]) -> dict[int, float]:
    """Return for how long each thread has had a core or waited for one."""
    found = {}
    for process in processes:
        for path in Path(f"/proc/{process.pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError, ValueError):
                used, waited, _ = path.read_text().split()
                found[int(path.parent.name)] = (int(used) + int(waited)) / 1e9
    return found


def _read_pairs(texts: Iterable[str]) -> list[tuple[str, int]]:
    return [(host, int(pid)) for host, pid in (text.split() for text in texts)]
