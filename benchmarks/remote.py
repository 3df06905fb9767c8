"""Work from a laptop: calls, bytes and seconds of `--on`, beside what people type by hand over the same connection.

    python benchmarks/remote.py [--repeats 5] [--runs 1000] [--seconds 60] [--round-trip 0.0 0.2] [--nemo PYTHON]

A real sshd in front of a Slurm on this machine, a relay that counts bytes and adds latency, and one open connection for
everything. `submit` is compared with `rsync` and `ssh sbatch`, a list of runs with `ssh squeue`, following with
`ssh tail -f`. Following is measured for `--seconds` and multiplied up to an hour; nothing in it is slower at first or
at the end. Target: `submit --on` takes at most 3 s longer than `submit` on the login node. CPU seconds are those of the
laptop's processes. NeMo-Run's tunnel is measured with a Python that has `nemo_run`. Needs root, openssh-server,
libpam-oath, oathtool, rsync and Slurm.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from paceline.tools.sandbox import PLAIN, Sandbox, Settings, missing_packages
from watch_parts.runs import make_runs

from machine import describe, show

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).parent / "results"
sys.path.insert(0, str(ROOT))

from tests.remote.lab import Lab, missing  # noqa: E402
from tests.remote.relay import Relay  # noqa: E402

EXTRA_SECONDS = 3.0  # target: what `--on` may add to a submission
COUNTED = ("seconds", "calls", "bytes", "cpu")
SMALL = ("--cpu", "--nproc", "1", "-t", "10")
BY_HAND = "#!/bin/sh\n#SBATCH --output=/dev/null --time=10\nsleep 600\n"
TALKATIVE = "import time\nwhile True:\n    print(time.time(), flush=True)\n    time.sleep(1)\n"
NEMO = """\
import sys
from nemo_run.core.tunnel.client import SSHTunnel
host, user, port, key, project, folder = sys.argv[1:]
tunnel = SSHTunnel(host=host, user=user, port=int(port), job_dir=folder, identity=key)
tunnel.connect()
tunnel.run("mkdir -p " + folder, hide=True)
tunnel.put(project + "/train.py", folder + "/train.py")
tunnel.put(project + "/job.sbatch", folder + "/job.sbatch")
print(tunnel.run("cd " + folder + " && sbatch --parsable job.sbatch", hide=True).stdout)
tunnel.cleanup()
"""


@dataclass
class Result:
    """One thing that was measured. `ratio` is against the peer of the same part and round trip."""

    part: str
    what: str
    round_trip: float
    seconds: float | None
    calls: float
    bytes: float
    cpu: float | None = None
    ratio: float | None = None


class Laptop:
    """Commands on the laptop, with what they cost."""

    def __init__(self, lab: Lab, relay: Relay, project: Path, repeats: int) -> None:
        self.lab, self.relay, self.project, self.repeats = lab, relay, project, repeats
        self.calls = lab.folder / "calls"
        self.environment = {**os.environ, **lab.variables}
        program = lab.bin / "ssh"
        counted = f'case "$*" in *" -O "*|*-G*) ;; *) echo x >>{self.calls};; esac\n'
        text = program.read_text()
        if counted not in text:
            program.write_text(text.replace("#!/bin/sh\n", f"#!/bin/sh\n{counted}"))

    def run(self, *argv: str) -> str:
        done = subprocess.run(
            argv,
            cwd=self.project,
            env=self.environment,
            text=True,
            capture_output=True,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0, f"{argv}: {done.stdout}{done.stderr}"
        return done.stdout

    def paceline(self, *args: str) -> str:
        return self.run(sys.executable, "-m", "paceline", *args)

    @contextmanager
    def counted(self, part: str, what: str, found: list[Result]) -> Iterator[None]:
        self.calls.write_text("")
        before = self.relay.sent + self.relay.received
        begin, cpu = time.perf_counter(), _children()
        yield
        seconds, cpu = time.perf_counter() - begin, _children() - cpu
        calls, total = (
            len(self.calls.read_text().splitlines()),
            self.relay.sent + self.relay.received - before,
        )
        found.append(Result(part, what, 2 * self.relay.delay, seconds, calls, total, cpu))

    def compare(self, part: str, cases: dict[str, Callable[[], object]]) -> list[Result]:
        """Measure each case, in turn so that all see the same load. The first is the peer of the others."""
        found: list[Result] = []
        for _ in range(self.repeats):
            for what, action in cases.items():
                with self.counted(part, what, found):
                    action()
        results = []
        for what in cases:
            rows = [each for each in found if each.what == what]
            middle = {key: median(getattr(each, key) for each in rows) for key in COUNTED}
            results.append(Result(part, what, 2 * self.relay.delay, **middle))
        return with_ratios(results)


def with_ratios(results: list[Result]) -> list[Result]:
    peer = results[0]
    for each in results:
        if each.seconds is not None and peer.seconds:
            each.ratio = each.seconds / peer.seconds
        elif peer.bytes:
            each.ratio = each.bytes / peer.bytes
    return results


def measure_submit(laptop: Laptop, nemo: str | None) -> list[Result]:
    """The code has one change each time, as between two tries of a user."""
    lab, project, number = laptop.lab, laptop.project, iter(range(10_000))

    def edit() -> None:
        (project / "train.py").write_text(f"import time\ntime.sleep(600)  # {next(number)}\n")

    def by_hand() -> None:
        edit()
        laptop.run("rsync", "-az", "-e", f"ssh -S {socket}", f"{project}/", "link:by-hand/")
        laptop.run("ssh", "-S", socket, "link", "cd by-hand && sbatch --parsable job.sbatch")

    def there() -> None:  # what the same costs on the login node itself
        edit()
        lab.on_node(
            f"cp {project}/*.py {lab.home}/local/ && cd {lab.home}/local && {python} submit {' '.join(SMALL)} train.py"
        )

    def remote() -> None:
        edit()
        laptop.paceline("submit", "--on", "link", *SMALL, "train.py")

    def tunnel() -> None:
        edit()
        laptop.run(
            str(nemo),
            "-c",
            NEMO,
            "127.0.0.1",
            lab.user,
            str(laptop.relay.port),
            str(lab.key),
            str(project),
            f"{lab.home}/nemo",
        )

    socket = next(
        str(each) for each in (lab.folder / "run" / "paceline").iterdir() if not each.suffix
    )
    (installed,) = (lab.home / ".cache" / "paceline").glob("paceline-*")
    conf = next(node.variables["SLURM_CONF"] for node in lab.more if node.name == "slurm")
    python = f'SLURM_CONF={conf} "$(cat {installed}/python)" -I {installed}/start.py'
    lab.on_node("mkdir -p local")
    cases: dict[str, Callable[[], object]] = {
        "rsync; ssh sbatch": by_hand,
        "paceline submit, on the login node": there,
        "paceline submit --on": remote,
    }
    if nemo:
        cases["NeMo-Run SSHTunnel: connect, put, sbatch"] = tunnel
    return laptop.compare("submit", cases)


def measure_list(laptop: Laptop, socket: str, runs: int) -> list[Result]:
    return laptop.compare(
        f"list of {runs:,}",
        {
            "ssh squeue --me": lambda: laptop.run(
                "ssh", "-S", socket, "link", "squeue --me --array"
            ),
            "paceline ps --all --on": lambda: laptop.paceline("ps", "--all", "--on", "link"),
            "paceline ps --on": lambda: laptop.paceline("ps", "--on", "link"),
        },
    )


def measure_following(
    laptop: Laptop, socket: str, log: str, run: str, seconds: float
) -> list[Result]:
    """A rank that writes a line every second. Seconds are those of the measurement; bytes are those of an hour."""
    found: list[Result] = []
    python = [sys.executable, "-m", "paceline"]
    for what, argv in (
        ("ssh tail -f", ["ssh", "-S", socket, "link", f"tail -n 1 -f {log}"]),
        ("paceline logs -f --on", [*python, "logs", "-f", "--on", "link", run]),
    ):
        process = subprocess.Popen(
            argv,
            cwd=laptop.project,
            env=laptop.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        process.stdout.readline()
        with laptop.counted("an hour of following", what, found):
            time.sleep(seconds)
        process.terminate()
        lines = len(process.communicate()[0].splitlines())
        assert lines > seconds / 2, f"{what}: {lines} lines in {seconds} s"
        found[-1].bytes *= 3600 / seconds
        found[-1].calls, found[-1].seconds, found[-1].cpu = 1, None, None
    return with_ratios(found)


def prepare(lab: Lab, cluster: Sandbox, runs: int, folder: Path) -> Path:
    """Return a project on the laptop; the user has runs on the cluster, and as many jobs in the queue."""
    for path in (cluster.folder, *cluster.folder.glob("*/"), *cluster.folder.glob("tmp/*/")):
        path.chmod(0o1777 if path.parent.name == "tmp" else 0o755)
    lab.add("slurm", {"SLURM_CONF": cluster.environment["SLURM_CONF"]})
    project = folder / "project"
    project.mkdir()
    for number in range(50):
        (project / f"module{number}.py").write_text(f"VALUE = {number}\n" * 100)
    (project / "job.sbatch").write_text(BY_HAND)
    (project / "paceline.toml").write_text('[profiles.link]\nhost = "link"\n')
    for argv in (["init", "-q"], ["add", "-A"]):
        subprocess.run(["git", *argv], cwd=project, check=True)
    (folder / "made").mkdir()
    scratch = make_runs(folder / "made", runs, active=0)
    shutil.move(scratch, lab.home / "paceline")
    subprocess.run(["chown", "-R", f"{lab.user}:", str(lab.home / "paceline")], check=True)
    lab.on_node(
        f"export SLURM_CONF={cluster.environment['SLURM_CONF']};"
        f" printf '#!/bin/sh\\n' | sbatch --hold --array=1-{runs} --output=/dev/null"
    )
    return project


def measure(lab: Lab, cluster: Sandbox, folder: Path, args: argparse.Namespace) -> list[Result]:
    project = prepare(lab, cluster, args.runs, folder)
    node = next(node for node in lab.more if node.name == "slurm")
    results: list[Result] = []
    for round_trip in args.round_trip:
        with lab.link(node) as relay:
            laptop = Laptop(lab, relay, project, args.repeats)
            laptop.paceline("login", "link")
            with laptop.counted(
                "first command", "paceline ps --on, with the installation", results
            ):
                laptop.paceline("ps", "--on", "link")
            # now compiled, and the list has its index
            laptop.paceline("ps", "--all", "--on", "link")
            socket = next(
                str(each) for each in (lab.folder / "run" / "paceline").iterdir() if not each.suffix
            )
            relay.delay = round_trip / 2
            results += measure_submit(laptop, args.nemo)
            cluster.run(["scancel", "--state=RUNNING", f"--user={lab.user}"])
            results += measure_list(laptop, socket, args.runs)
            (project / "train.py").write_text(
                "import time\nwhile True:\n    print(time.time(), flush=True)\n    time.sleep(1)\n"
            )
            laptop.paceline(
                "submit", "--on", "link", *SMALL, "--name", f"talks-{round_trip}", "train.py"
            )
            log = wait_for_log(lab, f"talks-{round_trip}")
            results += measure_following(laptop, socket, log, f"talks-{round_trip}", args.seconds)
            laptop.paceline("cancel", "--on", "link", f"talks-{round_trip}")
            laptop.paceline("login", "--close")
            lab.wait_until_empty()
            lab.uninstall()
    return results


def wait_for_log(lab: Lab, name: str) -> str:
    deadline = time.monotonic() + 120
    while True:
        for record in (lab.home / "paceline" / "project" / "default").glob("*/run.json"):
            if json.loads(record.read_text()).get("name") == name:
                for log in record.parent.rglob("rank-0*.log"):
                    if log.stat().st_size:
                        return str(log)
        assert time.monotonic() < deadline, "the run writes nothing"
        time.sleep(0.5)


def report(results: Sequence[Result], path: Path) -> None:
    rows = [
        (
            each.part,
            each.what,
            f"{each.round_trip * 1000:.0f} ms",
            _number(each.seconds),
            _number(each.cpu),
            f"{each.calls:.0f}",
            f"{each.bytes / 1000:,.1f}",
            _number(each.ratio),
        )
        for each in results
    ]
    show(("", "command", "round trip", "seconds", "CPU", "calls", "kB", "ratio"), rows)
    for each in results:
        if each.what == "paceline submit --on":
            local = next(
                row
                for row in results
                if row.round_trip == each.round_trip and row.what.endswith("on the login node")
            )
            extra = (each.seconds or 0) - (local.seconds or 0)
            verdict = "kept" if extra <= EXTRA_SECONDS else "missed"
            print(
                f"submit --on, {each.round_trip * 1000:.0f} ms: {extra:.1f} s beyond a submit there"
                f" (target: at most {EXTRA_SECONDS:.0f} s, {verdict})"
            )
    machine = {
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "python": sys.version.split()[0],
    }
    path.write_text(
        json.dumps({"machine": machine, "results": [asdict(each) for each in results]}, indent=1)
        + "\n"
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=60.0, help="of following")
    parser.add_argument(
        "--round-trip", type=float, nargs="+", default=[0.0, 0.2], help="seconds that the link adds"
    )
    parser.add_argument("--nemo", metavar="PYTHON", help="a Python that has nemo_run")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where to write remote.json")
    args = parser.parse_args()
    describe("remote")
    if reason := missing():
        raise SystemExit(f"no login node to measure on: {reason}")
    if absent := missing_packages(Settings(network=PLAIN)):
        raise SystemExit(f"no Slurm to measure on: install {' '.join(absent)}")
    if args.nemo is None:
        print("NeMo-Run is not measured: name a Python that can import nemo_run with --nemo")
    with tempfile.TemporaryDirectory(prefix="pl-ssh-", ignore_cleanup_errors=True) as folder:
        (Path(folder) / "lab").mkdir()
        Path(folder).chmod(0o755)
        lab = Lab(Path(folder) / "lab")
        cluster = Sandbox.up(
            Path(folder) / "slurm", nodes=2, cpus=64, network=PLAIN, owner=os.getpid()
        )
        try:
            lab.up()
            report(measure(lab, cluster, Path(folder), args), args.results / "remote.json")
        finally:
            lab.down()
            cluster.down()


if __name__ == "__main__":
    main()
