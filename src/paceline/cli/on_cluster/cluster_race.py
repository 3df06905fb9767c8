"""The race of several clusters for one run: watch all of them, give permission to one, cancel the others."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from paceline.cli import console
from paceline.cli.on_cluster.on_cluster import Forwarded, converse
from paceline.contract.files.foreign_records import parse_object
from paceline.contract.files.grant_file import GRANTED, REFUSED
from paceline.contract.quote import quote
from paceline.contract.run_path import is_run_id
from paceline.contract.verdict import INTERRUPTED_EXIT
from paceline.errors import PacelineError
from paceline.ssh.request import OUTCOME
from paceline.watch.run_status import LOST

if TYPE_CHECKING:
    from paceline.ssh.cluster_race_record import ClusterRaceRecord
    from paceline.ssh.conversation import Conversation

PAUSE = 2.0  # seconds between questions to a cluster
RETRY = 5.0  # seconds after which a cluster that could not be reached is asked again
CANCEL_TIMEOUT = 60.0  # seconds in which clusters are told that another one has started
TRIES = 2  # of a cluster whose connection is closed, before the command ends without it
Answer = dict[str, Any]
STATE: dict[str, Any] = {
    "decision": str | None,
    "waits": bool,
    "over": bool,
    "status": str,
    "detail": str,
    "reason": str,  # why it waits; the detail says more, which may change all the while
}
NO_JOB: Answer = {
    "decision": REFUSED,
    "waits": False,
    "over": True,
    "status": "no job was submitted",
    "detail": "",
    "reason": "",
}


def ask_outcome(name: str, submission: str, config: str | None) -> str | None:
    """Ask a cluster which run a submission has led to whose answer was lost; None if there is none, and will be none.

    Raises PacelineError, OSError or ValueError if it does not answer.
    """
    with converse(
        Forwarded([name], "submit_first", list(OUTCOME), {"config": config}), submission
    ) as talk:
        answer = parse_object(talk.read_line())
    return read_run(answer) if answer.get("run", 0) is not None else None


def read_run(answer: Answer) -> str:
    """Return the run that an answer names. Raises ValueError if it names none: commands to copy have it."""
    run = answer.get("run")
    if not isinstance(run, str) or not is_run_id(run):
        raise ValueError("it names no run")
    return run


def read_state(line: bytes) -> Answer:
    """Return how far a cluster is. Raises ValueError if its answer says anything else."""
    answer = parse_object(line)
    if not all(key in answer and isinstance(answer[key], kind) for key, kind in STATE.items()):
        raise ValueError("a key is missing")
    return answer


def describe_state(found: Answer) -> str:
    """Return how far a cluster is, for people; empty if it may train, which is said elsewhere."""
    if found["decision"] == GRANTED:
        return ""
    if found["waits"] or (found["status"] == "running" and found["decision"] is None):
        return "started; waiting for permission to train"
    return f"{found['status']}{' (' + found['detail'] + ')' if found['detail'] else ''}"


class Contender:
    """A cluster that has the run. Questions wait in a thread of its own: a silent link must not hold up the others."""

    def __init__(self, name: str, run: str | None, submission: str, config: str | None) -> None:
        self.name, self.run, self._submission, self._config = name, run, submission, config
        self._pool = ThreadPoolExecutor(1)
        self._talk: Conversation | None = None
        self._pending: Future[Answer | None] | None = None
        self._question, self._next = "", 0.0
        self.failures = 0  # in a row
        self._said = self._problem = ""
        self._is_refused = False

    def refuse(self) -> None:
        """Print no more states: from now on, only its end counts."""
        self._is_refused, self.failures, self._next = True, 0, 0.0

    def ask(self, question: str) -> Answer | None:
        """Ask, without waiting; return the answer to this question once it is there."""
        if self._pending is not None and self._pending.done():
            pending, self._pending = self._pending, None
            found = pending.result()
            self.failures = 0 if found else self.failures + 1
            # Ctrl-C may have closed the connection
            is_cut = self._is_refused and self.failures == 1
            self._next = time.monotonic() + (PAUSE if found or is_cut else RETRY)
            self._say(found)
            if self._question == question and found is not None:
                return found
        if self._pending is None and (time.monotonic() >= self._next or question != self._question):
            self._question = question
            self._pending = self._pool.submit(self._exchange, question)
        return None

    def _exchange(self, question: str) -> Answer | None:
        """Ask the program on the cluster, over a new connection if the earlier one was lost."""
        try:
            if self.run is None:
                self.run = ask_outcome(self.name, self._submission, self._config)
            if self.run is None:
                return NO_JOB
            if self._talk is None:
                line = ["submit", f"--serve-first={self.run}"]
                self._talk = converse(
                    Forwarded([self.name], "submit_first", line, {"config": self._config})
                )
                self._talk.__enter__()
            self._talk.send(f"{question}\n".encode())
            return read_state(self._talk.read_line())
        except (PacelineError, OSError, ValueError) as problem:
            self._problem = self._describe(problem)
            self.hang_up()
            return None

    def _describe(self, problem: Exception) -> str:
        """Return why there is no answer, for people."""
        talk = self._talk
        if talk is not None and not talk.connection.is_open():
            problem = talk.connection.not_open()
        if isinstance(problem, PacelineError):
            return f"{problem.message.rstrip('.')}; without permission it does not train. {problem.hint}".strip()
        return "gave no usable answer; without permission it does not train"

    def _say(self, found: Answer | None) -> None:
        """Print the state of the cluster if it is another one than before."""
        text = describe_state(found) if found is not None else self._problem
        event = describe_state({**found, "detail": found["reason"]}) if found is not None else text
        if text and event != self._said and not self._is_refused:
            self._said = event
            console.say_about(self.name, text)

    def hang_up(self) -> None:
        talk, self._talk = self._talk, None
        if talk is not None:
            with suppress(PacelineError, OSError, AttributeError):
                talk.__exit__()

    def close(self) -> None:
        self.hang_up()
        self._pool.shutdown(wait=False, cancel_futures=True)


class ClusterRace:
    def __init__(self, record: ClusterRaceRecord) -> None:
        self.record = record
        self.contenders = {
            name: Contender(
                name, record.runs.get(name), record.submissions.get(name, ""), record.config
            )
            for name in {**record.submissions, **record.runs}
        }

    def __enter__(self) -> ClusterRace:
        return self

    def __exit__(self, *_: object) -> None:
        for each in self.contenders.values():
            each.close()

    def run(self) -> int:
        """Wait until one has started and has its permission; then cancel the others."""
        record = self.record
        while not record.is_granted:
            self._look()
            if record.chosen is not None:
                found = self._ask(record.chosen, "grant")
                if found is not None and found["decision"] == GRANTED:
                    record.confirm()
                elif found is not None:
                    record.drop(record.chosen)
            if len(record.out) == len(self.contenders):
                record.finish()
                console.say_problem(
                    "No cluster is training this run.",
                    "See what happened with `paceline show RUN --on CLUSTER`.",
                )
                return 1
            time.sleep(0.1)
        assert record.chosen is not None
        run = quote(record.runs[record.chosen])
        print(f"{record.chosen}: started first and is training {run}", flush=True)
        _, unreachable = self._refuse([name for name in self.contenders if name != record.chosen])
        if all(name in record.runs for name in unreachable):
            record.finish()
        for what, command in (
            ("logs", f"logs -f {run}"),
            ("state", "ps"),
            ("cancel", f"cancel {run}"),
        ):
            print(f"  {what:<7} paceline {command} --on {quote(record.chosen)}")
        return 0

    def _ask(self, name: str, question: str) -> Answer | None:
        """Ask a cluster, without waiting, and note the run of a submission whose answer was lost."""
        found, run = self.contenders[name].ask(question), self.contenders[name].run
        if run is not None and name not in self.record.runs:
            self.record.note_run(name, run)
            console.say_about(name, f"the answer was lost, but {run} was submitted")
        return found

    def _look(self) -> None:
        """Ask those that may still train, and choose the first that waits for permission."""
        for name in self.contenders:
            if name in self.record.out or name == self.record.chosen:
                continue
            found = self._ask(name, "state")
            if found is None:
                continue
            is_over = found["over"] and found["status"] != LOST  # Slurm may not know a new job yet
            if is_over or found["decision"] not in (None, GRANTED):
                self.record.drop(name)
            elif self.record.chosen is None and (found["waits"] or found["decision"] == GRANTED):
                self.record.choose(name)

    def _refuse(self, names: list[str]) -> tuple[list[str], list[str]]:
        """Cancel the jobs on these clusters; return those that train after all, and those that do not answer."""
        waiting, trains, unreachable = list(names), list[str](), list[str]()
        winner = (
            console.printable(self.record.chosen)
            if self.record.is_granted and self.record.chosen
            else ""
        )
        deadline = time.monotonic() + CANCEL_TIMEOUT
        for name in names:
            self.contenders[name].refuse()
        while waiting and time.monotonic() < deadline:
            for name in list(waiting):
                found = self._ask(name, f"refuse {winner}")
                if found is None:
                    if self.contenders[name].failures > TRIES:
                        waiting.remove(name)
                        unreachable.append(name)
                    continue
                waiting.remove(name)
                if found["decision"] == GRANTED:
                    trains.append(name)
                elif name not in self.record.out and name in self.record.runs:
                    print(
                        console.printable(f"{name}: cancelled {self.record.runs[name]}"), flush=True
                    )
            time.sleep(0.1)
        unreachable += waiting
        for name in unreachable:
            what = (
                f"did not respond within {CANCEL_TIMEOUT:.0f} s"
                if name in waiting
                else "could not be reached"
            )
            if name not in self.record.runs:
                later = (
                    f"paceline login {quote(name)}; then: paceline submit --finish {self.record.id}"
                )
                why = "a job may still be queued there; it never trains without permission"
                console.say_about(name, f"{what}: {why}. To cancel it: {later}")
                continue
            cancel = f"paceline cancel {quote(self.record.runs[name])} --on {quote(name)}"
            why = (
                "it may have permission to train"
                if name == self.record.chosen
                else "without permission, it never trains"
            )
            console.say_about(name, f"{what}: {why}. To cancel the job there: {cancel}")
        return trains, unreachable

    def give_up(self) -> int:
        """After Ctrl-C: cancel all that have no permission yet."""
        console.say_note("cancelling all jobs without permission to train")
        self.record.give_up()
        trains = [self.record.chosen] if self.record.is_granted and self.record.chosen else []
        more, unknown = self._refuse([name for name in self.contenders if name not in trains])
        for name in (*trains, *more):
            run = quote(self.record.runs[name])
            console.say_about(
                name, f"is training {run}; to cancel it: paceline cancel {run} --on {quote(name)}"
            )
        if self.record.chosen in unknown:
            console.say_note(f"to finish this later: paceline submit --finish {self.record.id}")
        elif all(name in self.record.runs for name in unknown):
            self.record.finish()
        return INTERRUPTED_EXIT
