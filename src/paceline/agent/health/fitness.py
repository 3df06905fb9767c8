"""The fitness check of all nodes: agents start the measurement, and the head agent judges it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.agent.python_command import DROP_CWD_FROM_PATH
from paceline.agent.rendezvous.connected_agents import Rendezvous
from paceline.agent.workers import process_tree
from paceline.agent.workers.started_ranks import Launch
from paceline.contract import env
from paceline.contract.fitness import Judgement, Measurement, judge
from paceline.contract.foreign_records import make, read_object
from paceline.contract.run_folder import RunFolder, write_atomically

TIME_LIMIT = 30.0  # seconds for all of it
ANSWER_TIME = 6.0  # seconds of them for the answers of the members, and for the verdict after them
RESULT, VERDICT = "fitness", "fitness_verdict"
_START = f"{DROP_CWD_FROM_PATH}; from paceline.runtime.distributed.fitness import main; main()"


class FitnessCheck:
    """One agent's part: it measures its node; the head agent collects all numbers, and tells the
    others.
    """

    def __init__(
        self,
        launch: Launch,
        run: RunFolder,
        rendezvous: Rendezvous,
        interrupted: Callable[[], bool],
    ) -> None:
        self._launch, self._run, self._rendezvous, self._interrupted = (
            launch,
            run,
            rendezvous,
            interrupted,
        )
        self._deadline = time.monotonic() + TIME_LIMIT

    def run(self) -> list[Judgement]:
        """Return what is slow, the same on all agents. Collective."""
        measured = self._measure(self._deadline - ANSWER_TIME)
        own = {"host": self._launch.placement.host, "ranks": [asdict(each) for each in measured]}
        if not self._launch.placement.is_head:
            self._rendezvous.send({"kind": RESULT, **own}, to=0)
            message = self._await(VERDICT, {0}).get(0, {})
            return [
                Judgement(**{**each, "evidence": tuple(each["evidence"])})
                for each in message.get("found", [])
            ]
        members = self._await(RESULT, set(range(1, self._launch.placement.count)))
        reports = [own, *members.values()]
        ranks = [make(Measurement, each) for report in reports for each in report["ranks"]]
        found = list(judge(ranks))
        found += self._find_silent(reports, {each.host for each in found})
        self._record(ranks, found)
        self._rendezvous.send({"kind": VERDICT, "found": [asdict(each) for each in found]})
        return found

    def _measure(self, deadline: float) -> list[Measurement]:
        """Run the measurement on this node's ranks, and return what they wrote."""
        folder = self._run.path / "fitness"
        folder.mkdir(parents=True, exist_ok=True)
        common = {**self._launch.common_environ(), env.FITNESS: str(folder)}
        if not self._launch.launch_spec.gpus:
            common[env.FITNESS_CPU] = "1"
        started = []
        numbers = [rank for rank, _ in self._launch.ranks()]
        for rank, local_rank in self._launch.ranks():
            (folder / f"rank-{rank}.json").unlink(missing_ok=True)
            started.append(
                subprocess.Popen(
                    [self._launch.launch_spec.python, "-c", _START],
                    start_new_session=True,
                    env={**common, **self._launch.rank_environ(rank, local_rank)},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            )
        try:
            while any(each.poll() is None for each in started) and time.monotonic() < deadline:
                if self._interrupted():
                    break
                time.sleep(0.05)
        finally:
            for each in started:
                process_tree.signal_group(each.pid, signal.SIGKILL)
                each.wait()
        return list(_read(folder, numbers))

    def _await(self, kind: str, senders: set[int]) -> dict[int, dict[str, Any]]:
        """Return one message of each sender, or of those that answer in time."""
        found: dict[int, dict[str, Any]] = {}
        other = []
        deadline = self._deadline + (0.0 if self._launch.placement.is_head else ANSWER_TIME)
        while senders - set(found) and time.monotonic() < deadline and not self._interrupted():
            for message in self._rendezvous.poll():
                if message.get("kind") == kind:
                    found[message["from"]] = message
                else:
                    other.append(message)
            if any(message.get("kind") == "lost" for message in other):
                break
            time.sleep(0.05)
        self._rendezvous.put_back(other)
        return found

    @staticmethod
    def _find_silent(reports: Iterable[Mapping[str, Any]], blamed: set[str]) -> list[Judgement]:
        """Name nodes that have measured nothing in time, although others have: torch may take long
        to import there.
        """
        silent = {str(each["host"]) for each in reports if not each["ranks"]} - blamed
        measured = {str(each["host"]) for each in reports if each["ranks"]}
        text = f"it has measured nothing within {TIME_LIMIT:.0f} s"
        return [
            Judgement(host, text, unfit=False) for host in sorted(silent - measured) if measured
        ]

    def _record(self, ranks: list[Measurement], found: list[Judgement]) -> None:
        """Leave the numbers for `paceline doctor`."""
        record = {
            "time": time.time(),
            "ranks": [asdict(each) for each in ranks],
            "found": [asdict(each) for each in found],
        }
        with suppress(OSError):
            write_atomically(self._run.fitness, json.dumps(record, indent=1) + "\n")
            (self._run.path / "fitness").rmdir()


def _read(folder: Path, ranks: Iterable[int]) -> Iterable[Measurement]:
    for rank in ranks:
        try:
            yield make(Measurement, read_object(folder / f"rank-{rank}.json"))
        except (OSError, ValueError):
            continue
        os.unlink(folder / f"rank-{rank}.json")
