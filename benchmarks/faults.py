"""One small training, written with Paceline and written the usual way for torchrun, and functions that inject faults.

Each step takes a fixed time (a sleep replaces the GPU's work), so that only the cost of faults is measured.
Both scripts record every step that rank 0 completes, and the pid of every rank.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

COMMON = """
import os, sys, time
from pathlib import Path
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

out, steps, step_time, per_epoch, hang_timeout = Path(sys.argv[1]), *map(float, sys.argv[2:6])
steps, per_epoch = int(steps), int(per_epoch)
on_gpu = sys.argv[6] == "cuda"
generator = torch.Generator().manual_seed(0)
inputs = torch.randn(per_epoch * 8, 32, generator=generator)
data = TensorDataset(inputs, torch.randint(10, (per_epoch * 8,), generator=generator))
def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
def write_pid(rank):
    (out / f".pid-{rank}").write_text(str(os.getpid()))
    os.replace(out / f".pid-{rank}", out / f"pid-{rank}")
log = os.open(out / "steps", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
def completed(rank, step):
    if rank == 0:
        os.write(log, f"{time.time():.6f} {step} {os.getpid()}\\n".encode())
"""

PACELINE = (
    COMMON
    + """
import paceline
with paceline.session(seed=0, cpu=not on_gpu, save_every_seconds=2.0, progress=False, report=False) as run:
    model = run.wrap(net())
    opt = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loader = run.loader(data, batch_size=8)
    run.resume(model=model, opt=opt, loader=loader)
    write_pid(run.rank)
    for epoch in run.epochs(10**6):
        for x, y in run.steps(loader, max_steps=max(0, steps - run.step)):
            time.sleep(step_time)
            loss = F.cross_entropy(model(x), y)
            run.backward(loss)
            run.update(opt)
            run.log(loss=loss)
            completed(run.rank, run.step + 1)
        if run.step >= steps:
            break
"""
)

PLAIN = (
    COMMON
    + """
from datetime import timedelta
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
if on_gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(seconds=hang_timeout))
rank = dist.get_rank()
model = DistributedDataParallel(net().to(device))
opt = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8 // dist.get_world_size(), sampler=sampler)
step = first = 0
if (out / "last.pt").exists():
    state = torch.load(out / "last.pt", map_location=device)
    model.load_state_dict(state["model"])
    opt.load_state_dict(state["opt"])
    step, first = state["step"], state["epoch"]
write_pid(rank)
for epoch in range(first, 10**6):
    sampler.set_epoch(epoch)
    for x, y in loader:
        if step >= steps:
            break
        time.sleep(step_time)
        loss = F.cross_entropy(model(x.to(device)), y.to(device))
        loss.backward()
        opt.step()
        opt.zero_grad()
        step += 1
        completed(rank, step)
    if step >= steps:
        break
    if rank == 0:
        state = {"model": model.state_dict(), "opt": opt.state_dict(), "step": step, "epoch": epoch + 1}
        torch.save(state, out / "new.pt")
        os.replace(out / "new.pt", out / "last.pt")
dist.destroy_process_group()
"""
)


class Training:
    """A running training. Each kind has its own way to start again after a preemption."""

    name = ""
    script = ""

    def __init__(
        self,
        folder: Path,
        *,
        ranks: int,
        steps: int,
        step_time: float,
        per_epoch: int,
        hang_timeout: float,
        device: str = "cpu",
    ) -> None:
        self.folder, self.ranks, self.hang_timeout, self.device = (
            folder,
            ranks,
            hang_timeout,
            device,
        )
        self.out = folder / "out"
        self.out.mkdir(parents=True)
        (folder / "train.py").write_text(self.script)
        self.args = [
            "train.py",
            str(self.out),
            *map(str, (steps, step_time, per_epoch, hang_timeout)),
            device,
        ]
        self.process: subprocess.Popen[bytes] | None = None

    def command(self) -> list[str]:
        raise NotImplementedError

    def start(self) -> None:
        environment = {
            **os.environ,
            "PACELINE_SCRATCH": str(self.folder / "runs"),
            "OMP_NUM_THREADS": "1",
        }
        with open(self.folder / "console", "ab") as console:
            self.process = subprocess.Popen(
                self.command(),
                cwd=self.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
            )

    def completed(self) -> list[tuple[float, int, int]]:
        """Return the time, step and pid of every completed step, including repeated ones."""
        try:
            rows = [line.split() for line in (self.out / "steps").read_text().splitlines()]
        except FileNotFoundError:
            return []
        return [(float(row[0]), int(row[1]), int(row[2])) for row in rows if len(row) == 3]

    def pid(self, rank: int) -> int:
        return int((self.out / f"pid-{rank}").read_text())

    def signal_rank(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to a rank, if it is still running."""
        try:
            os.kill(self.pid(rank), number)
        except (OSError, ValueError):
            pass

    def kill(self) -> None:
        self.signal_rank(self.ranks - 1, signal.SIGKILL)

    def hang(self) -> None:
        self.signal_rank(self.ranks - 1, signal.SIGSTOP)

    def preempt(self) -> None:
        """Stop and start again, as if the scheduler preempted the job and restarted it at once."""
        self.stop()
        self.start()

    def stop(self) -> None:
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def close(self) -> None:
        self.stop()
        for rank in range(self.ranks):
            self.signal_rank(rank, signal.SIGKILL)

    def console(self) -> str:
        return (self.folder / "console").read_text(errors="replace")


class Paceline(Training):
    name, script = "paceline", PACELINE

    def command(self) -> list[str]:
        start = [sys.executable, "-m", "paceline", "run"]
        if (self.folder / "runs").exists():
            return [*start, "--resume", "last"]
        return [
            *start,
            *(["--cpu"] if self.device == "cpu" else []),
            "--nproc",
            str(self.ranks),
            "--max-restarts",
            "100",
            "--no-snapshot",
            "--hang-timeout",
            f"{self.hang_timeout:.0f}s",
            *self.args,
        ]


class Torchrun(Training):
    name, script = "torchrun", PLAIN

    def command(self) -> list[str]:
        return [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={self.ranks}",
            "--max-restarts=100",
            *self.args,
        ]


def wait_until_training(training: Training, *, after: float = 0.0, within: float = 120.0) -> float:
    """Wait for the first step completed after a time, and return when that was."""
    deadline = time.time() + within
    while time.time() < deadline:
        for moment, _, _ in reversed(training.completed()):
            if moment > after:
                return min(row[0] for row in training.completed() if row[0] > after)
            break
        assert training.process is not None
        if training.process.poll() is not None:
            break
        time.sleep(0.05)
    sys.exit(f"{training.name} makes no progress:\n{training.console()[-3000:]}")
