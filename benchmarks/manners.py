"""How often Paceline asks Slurm: a follow, `ps` in a loop, and a hundred watchers, beside a loop of `squeue`.

    python benchmarks/manners.py [--seconds 120] [--speed 4]

Target: `paceline logs -f` asks at most 65 times an hour, and a hundred watchers at once ask once. The controller counts
the calls (`sdiag`) and, as a cross-check, so does a script in front of `squeue`. To take a minute instead of an hour,
the clock runs `--speed` times as fast: the poll interval is 60 s divided by it, and so are the pauses of the loops. A
loop whose command takes longer than its pause runs as often as it can. The run folder is read as often as ever.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from paceline.contract.run_folder import RunFolder
from paceline.tools.sandbox import PLAIN, Sandbox, Settings, missing_packages

from machine import describe, show

RUNS = 5
WATCHERS = 100
LIMIT = 65  # calls of a follow in an hour

COUNTING = """\
#!/bin/sh
echo x >>{calls}
exec {squeue} "$@"
"""

LOOP = "while :; do {command} >/dev/null; sleep {pause}; done"

LOOK = f"""\
import os, sys
from pathlib import Path
from paceline.contract.run_folder import RunFolder
from paceline.watch.records import read_record

gate, opener = os.pipe()

def look():
    os.read(gate, 1)
    os._exit(read_record(RunFolder(Path(sys.argv[1]))).status != "running")

pids = [os.fork() or look() for _ in range({WATCHERS})]
os.write(opener, b"x" * {WATCHERS})
assert not any(os.waitpid(pid, 0)[1] for pid in pids)
"""


class Counter:
    """Counts the calls of commands, by the controller and by a script in front of squeue."""

    def __init__(self, cluster: Sandbox, home: Path, speed: float) -> None:
        self.cluster, self.home = cluster, home
        self.calls = home / "calls"
        self.calls.touch()
        tools = home / "tools"
        tools.mkdir()
        real = cluster.run(["sh", "-c", "command -v squeue"]).stdout.strip()
        (tools / "squeue").write_text(COUNTING.format(calls=self.calls, squeue=real))
        (tools / "squeue").chmod(0o755)
        self.environment = {
            **os.environ,
            **cluster.environment,
            "PACELINE_SCRATCH": str(home / "scratch"),
            "PACELINE_POLL_INTERVAL": str(60 / speed),
            "PATH": f"{tools}:{os.environ['PATH']}",
        }

    def answered(self) -> int:
        found = re.findall(
            r"REQUEST_JOB(?:_USER)?_INFO\s*\(\s*\d+\)\s*count:(\d+)",
            self.cluster.run(["sdiag"]).stdout,
        )
        return sum(map(int, found))

    def count(self, argv: list[str], seconds: float | None) -> tuple[int, int]:
        """Run a command, for so long or to its end; return how often the controller and the script were asked."""
        answered, asked = self.answered(), self.calls.stat().st_size
        process = subprocess.Popen(
            argv, env=self.environment, stdout=subprocess.DEVNULL, start_new_session=True
        )
        if seconds is None:
            assert process.wait() == 0, argv
        else:
            time.sleep(seconds)
            assert process.poll() is None, f"it ended: {argv}"
            os.killpg(process.pid, 15)
            process.wait()
        return self.answered() - answered, (self.calls.stat().st_size - asked) // 2


def make_runs(cluster: Sandbox, home: Path) -> list[RunFolder]:
    """Jobs that sleep, and a run folder for each."""
    folders = []
    for number in range(RUNS):
        script = "#!/bin/sh\nsleep 3600\n"
        job = cluster.run(
            ["sbatch", "--parsable", "--output=/dev/null"], input=script
        ).stdout.strip()
        folder = RunFolder(
            home / "scratch" / "project" / "default" / f"20260101-00000{number}-aaaa"
        )
        folder.job_start(f"{job}-0").path.mkdir(parents=True)
        folder.claims.mkdir()
        (folder.claims / "1").symlink_to(f"{job}-0")
        folder.run_json.write_text(json.dumps({"nodes": 1, "nproc": 1}))
        folder.job.write_text(f"{job}\n")
        folders.append(folder)
    deadline = time.monotonic() + 60
    while cluster.run(["squeue", "--noheader", "--format=%T"]).stdout.split() != ["RUNNING"] * RUNS:
        assert time.monotonic() < deadline, "the jobs do not start"
        time.sleep(0.5)
    return folders


def measure(counter: Counter, folder: RunFolder, seconds: float, speed: float) -> None:
    paceline = f"{sys.executable} -m paceline"
    pause = 2 / speed
    cases = {
        "watch -n 2 squeue --me": ["sh", "-c", LOOP.format(command="squeue --me", pause=pause)],
        "paceline logs -f": [*paceline.split(), "logs", "-f", str(folder.path)],
        "watch -n 2 paceline ps": ["sh", "-c", LOOP.format(command=f"{paceline} ps", pause=pause)],
    }
    rows, per_hour = [], {}
    for name, argv in cases.items():
        answered, asked = counter.count(argv, seconds)
        per_hour[name] = answered * 3600 / (seconds * speed)
        rows.append([name, str(answered), str(asked), f"{per_hour[name]:,.0f}"])
    time.sleep(2 * 60 / speed)  # until the last answer is too old
    answered, asked = counter.count([sys.executable, "-c", LOOK, str(folder.path)], None)
    rows.append([f"{WATCHERS} watchers at once", str(answered), str(asked), ""])
    show(["command", "calls by sdiag", "by the script", "per hour"], rows)
    print(
        f"paceline logs -f: {per_hour['paceline logs -f']:.0f} calls an hour (target: at most {LIMIT})"
    )
    print(f"{WATCHERS} watchers: {answered} call{'s' * (answered != 1)} (target: at most 1)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=120.0, help="for each command")
    parser.add_argument("--speed", type=float, default=4.0, help="how much faster the clock runs")
    args = parser.parse_args()
    describe("manners")
    if missing := missing_packages(Settings(network=PLAIN)):
        raise SystemExit(f"no Slurm to measure on: install {' '.join(missing)}")
    print(
        f"the clock runs {args.speed:g} times as fast: Slurm is asked every {60 / args.speed:g} s instead of 60 s"
    )
    with tempfile.TemporaryDirectory(prefix="paceline-", ignore_cleanup_errors=True) as folder:
        home = Path(folder)
        cluster = Sandbox.up(home / "slurm", nodes=2, cpus=8, network=PLAIN, owner=os.getpid())
        try:
            folders = make_runs(cluster, home)
            measure(Counter(cluster, home, args.speed), folders[0], args.seconds, args.speed)
        finally:
            cluster.down()


if __name__ == "__main__":
    main()
