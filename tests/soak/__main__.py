"""Keep many runs alive on a real Slurm, break everything around them at random, and judge how each one ends.

    python -m tests.soak [--minutes 60] [--runs 20] [--seed 0] [--nodes 6] [--json FILE]

Every run must end as done, with the losses and weights of an undisturbed run to the last bit, or as failed or lost, and
then `paceline ps` or `show` must name the cause. If `ps` says that a run gives no sign of life, the soak does what it
names, once, and counts the run as requeued by hand. Anything else is a defect: another status, wrong weights, no
cause, a run that is stuck, or processes and files left behind. The same seed gives the same shapes of runs and the same
kinds of faults at the same times; which run a fault hits also depends on how fast the machine is.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from paceline.contract.files import own_folder_name
from paceline.tools.sandbox import NAMESPACES, PLAIN
from paceline.watch.records import read_records
from tests.fault_tolerance.runs import Training
from tests.slurm.harness import Cluster
from tests.soak.faults import Faults
from tests.soak.runs import DEFECT, OUTCOMES, UNFINISHED, Shape, SoakRun, shared_disks

CPUS = 12  # of each node; few enough for twenty runs to use all six nodes
RUN_FAULT_EVERY, NODE_FAULT_EVERY = 8.0, 45.0  # seconds between two faults, on average
REPORT_EVERY = 15.0
# what runs on a node without a job
IS_OF_NODE = re.compile(r"node-init\.sh|slurmd |sleep 3600$|ps -eo")
FINISH_WITHIN = 1200.0  # seconds for the last runs to end


class Soak:
    def __init__(self, options: argparse.Namespace, base: Path, cluster: Cluster) -> None:
        self.options, self.base, self.cluster = options, base, cluster
        self.kept = base / "defects"
        self.live: list[SoakRun] = []
        self.ended: list[SoakRun] = []
        self.faults: Counter[str] = Counter()
        self.problems: list[str] = []
        self.ending = threading.Event()
        self.started = time.monotonic()
        self.undisturbed: dict[int, Training] = {}

    # -- from start to end -----------------------------------------------------------------------------

    def run(self) -> None:
        """Keep runs alive for the time that was asked for, then let them finish."""
        for ranks in (1, 2):
            self.undisturbed[ranks] = training = Training(
                self.base / f"undisturbed-{ranks}", "--nproc", str(ranks)
            )
            training.start()
            try:
                assert training.process is not None
                training.process.wait(FINISH_WITHIN)  # longer than a test would wait
                training.finish()
            finally:
                training.close()
        self.started = time.monotonic()
        threads = [
            threading.Thread(
                target=self._break, args=("runs", RUN_FAULT_EVERY, Faults.of_runs), daemon=True
            ),
            threading.Thread(
                target=self._break, args=("nodes", NODE_FAULT_EVERY, Faults.of_nodes), daemon=True
            ),
            threading.Thread(target=self._submit, daemon=True),
        ]
        for thread in threads:
            thread.start()
        try:
            self._watch(until=lambda: self.elapsed > self.options.minutes * 60)
        finally:
            self.ending.set()
            for thread in threads:
                thread.join(300)
        self.cluster.repair(timeout=180)
        deadline = time.monotonic() + FINISH_WITHIN
        self._watch(until=lambda: not self.live or time.monotonic() > deadline)

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.started

    def _submit(self) -> None:
        rng, number = random.Random(f"{self.options.seed} shapes"), 0
        while not self.ending.is_set():
            if len(self.live) >= self.options.runs:
                self.ending.wait(1)
                continue
            number += 1
            shape = Shape.choose(rng)
            try:
                self.live.append(SoakRun.submit(number, shape, self.base))
            except Exception as problem:
                self._complain(f"run {number} ({shape}): {problem}")
                self.ending.wait(5)

    def _break(self, name: str, every: float, kinds: Callable[[Faults], Sequence[Any]]) -> None:
        rng = random.Random(f"{self.options.seed} {name}")
        faults = Faults(self.cluster, rng, self._hit, self.ending)
        known = kinds(faults)
        # A generator of its own per fault: what a fault draws must not change the faults after it.
        while not self.ending.wait(rng.expovariate(1 / every)):
            fault, faults.rng = known[rng.randrange(len(known))], random.Random(rng.random())
            try:
                fault([run for run in list(self.live) if run.hosts])
            except Exception:
                self._complain(traceback.format_exc())

    def _complain(self, problem: str) -> None:
        """Report a problem of the soak itself, or something that is left behind."""
        self.problems.append(problem)
        print(f"problem: {problem}", flush=True)

    def _hit(self, kind: str, runs: Sequence[SoakRun]) -> None:
        self.faults[kind] += 1
        for run in runs:
            run.faults.append(kind)
            run.step_at_fault = run.step
            with open(run.home / "faults", "a") as file:
                file.write(
                    f"{time.time():.1f} {time.strftime('%H:%M:%S')} {kind} at step {run.step}\n"
                )

    def _watch(self, *, until: Callable[[], bool]) -> None:
        reported = 0.0
        while not until():
            runs = list(self.live)
            for run, record in zip(runs, read_records([run.folder for run in runs]), strict=True):
                if run.update(record):
                    self._end(run)
                elif remedy := run.take_remedy():
                    print(f"run {run.number}: {record.detail}", flush=True)
                    self.cluster.run(remedy, check=False)
                elif run.is_stuck:
                    run.outcome, run.reason = (
                        DEFECT,
                        f"stuck: {record.status} {record.detail} at step {run.step}",
                    )
                    self._end(run)
            if time.monotonic() - reported > REPORT_EVERY:
                reported = time.monotonic()
                self._report_progress()
            time.sleep(2)

    def _end(self, run: SoakRun) -> None:
        if not run.outcome:
            run.judge(self.undisturbed[run.shape.world_size])
            for path in run.temporary_files():
                self._complain(f"left behind: run {run.number}: {path}")
        if run.outcome == DEFECT:
            run.keep(self.kept)
            print(
                f"DEFECT in run {run.number} ({run.shape}), after {run.faults}: {run.reason}",
                flush=True,
            )
            self.cluster.run(["scancel", run.job], check=False)
        self.live.remove(run)
        self.ended.append(run)
        run.remove()

    # -- what came of it -------------------------------------------------------------------------------

    def _report_progress(self) -> None:
        outcomes = Counter(run.outcome for run in self.ended)
        counts = ", ".join(
            f"{outcomes[outcome]} {outcome}" for outcome in OUTCOMES if outcomes[outcome]
        )
        minutes = f"{self.elapsed / 60:.1f} of {self.options.minutes:g} min"
        print(
            f"{minutes}: {len(self.live)} live, {len(self.ended)} ended ({counts}), {self.faults.total()} faults",
            flush=True,
        )

    def leftovers(self) -> list[str]:
        """Return what the runs have left on the nodes, once none is live."""
        found = []
        for node in self.cluster.nodes if os.geteuid() == 0 and not self.live else []:
            find = ["find", "/dev/shm", "-mindepth", "1", "!", "-name", own_folder_name()]
            files = self.cluster.exec(node, find, timeout=60).stdout.splitlines()
            processes = self.cluster.exec(
                node, ["ps", "-eo", "pid=,args="], timeout=60
            ).stdout.splitlines()
            found += [f"{node}: {path}" for path in files]
            found += [
                f"{node}: process {line}" for line in processes if not IS_OF_NODE.search(line)
            ]
        return found

    def results(self) -> dict[str, Any]:
        kinds = sorted({*self.faults, *(kind for run in self.ended for kind in run.faults)})
        return {
            "seed": self.options.seed,
            "minutes": round(self.elapsed / 60, 1),
            "runs": len(self.ended),
            "outcomes": dict(Counter(run.outcome for run in self.ended)),
            "undisturbed": sum(not run.faults for run in self.ended),
            "requeued by hand": Counter(run.outcome for run in self.ended if run.requeued_by_hand),
            "faults": {
                kind: {
                    "count": self.faults[kind],
                    "runs": Counter(run.outcome for run in self.ended if kind in run.faults),
                }
                for kind in kinds
            },
            "not exact": [
                {
                    "run": run.number,
                    "shape": str(run.shape),
                    "faults": run.faults,
                    "outcome": run.outcome,
                    "reason": run.reason,
                }
                for run in self.ended
                if run.reason
            ],
            "problems": self.problems,
        }

    def close(self) -> None:
        """Give up what is still live. The sandbox ends it when it goes down."""
        self.ending.set()
        for run in self.live:
            run.outcome = UNFINISHED
            self.ended.append(run)
        self.live = []

    def run_and_report(self) -> dict[str, Any]:
        """Run, and return the numbers, even after Ctrl-C."""
        try:
            self.run()
            for each in self.leftovers():
                self._complain(f"left behind: {each}")
        except KeyboardInterrupt:
            print("interrupted: these are the numbers so far", flush=True)
        finally:
            self.close()
            results = self.results()
            print_results(results)
            if self.options.json:
                self.options.json.write_text(json.dumps(results, indent=1) + "\n")
        return results


def print_results(results: dict[str, Any]) -> None:
    table = Table(
        "fault",
        "count",
        "runs hit",
        *OUTCOMES,
        title=f"{results['runs']} runs in {results['minutes']} min",
    )
    for kind, row in results["faults"].items():
        counts = row["runs"]
        table.add_row(
            kind, str(row["count"]), str(counts.total()), *(str(counts[each]) for each in OUTCOMES)
        )
    outcomes = Counter(results["outcomes"])
    total = sum(row["count"] for row in results["faults"].values())
    table.add_section()
    by_hand = results["requeued by hand"]
    table.add_row(
        "requeued by hand", "", str(by_hand.total()), *(str(by_hand[each]) for each in OUTCOMES)
    )
    table.add_row(
        "all", str(total), str(results["runs"]), *(str(outcomes[each]) for each in OUTCOMES)
    )
    Console(width=110).print(table)
    for each in results["not exact"]:
        after = ", ".join(each["faults"]) or "no fault"
        print(
            f"run {each['run']} ({each['shape']}) after {after}: {each['outcome']}: {each['reason']}"
        )
    for problem in results["problems"]:
        print(f"problem: {problem}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="how long faults happen")
    parser.add_argument("--runs", type=int, default=20, help="runs that are alive at the same time")
    parser.add_argument("--seed", type=int, default=0, help="of the runs' shapes and of the faults")
    parser.add_argument("--nodes", type=int, default=6, help="nodes of the sandbox")
    parser.add_argument("--json", type=Path, help="file for the numbers")
    return parser.parse_args()


def main() -> None:
    options = parse()
    # A private folder that all nodes see, with a name short enough for sockets.
    base = Path(tempfile.mkdtemp(prefix="paceline-slurm-"))
    # a background job ignores it otherwise
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    network = NAMESPACES if os.geteuid() == 0 else PLAIN
    with shared_disks(base / "disks"):
        cluster = Cluster.up(
            base, nodes=options.nodes, cpus=CPUS, gpus=0, network=network, owner=os.getpid()
        )
        soak = Soak(options, base, cluster)
        try:
            os.environ.update(cluster.environment)
            print(f"sandbox and runs: {base}", flush=True)
            results = soak.run_and_report()
        finally:
            cluster.down()
            for run in soak.ended:
                run.remove()
    if results["problems"] or results["outcomes"].get(DEFECT):
        sys.exit(f"not every run ended as it should: see {soak.kept}")
    shutil.rmtree(base, ignore_errors=True)


if __name__ == "__main__":
    main()
