"""Wait for permission before any rank starts: a run submitted to several clusters trains on only
one of them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from paceline.agent.stop.received_signals import Requests
from paceline.contract.files.grant_file import EXPIRED, GRANTED, decide_grant, read_grant
from paceline.contract.jsonl import EventWriter
from paceline.contract.run_folder import JobStartFolder, RunFolder, write_atomically
from paceline.contract.verdict import STOPPED

PAUSE = 1.0  # seconds between looks


@dataclass(frozen=True)
class GrantWait:
    run: RunFolder
    job_start: JobStartFolder
    requests: Requests
    events: EventWriter
    say: Callable[[str], None]

    def decide(self, timeout: float) -> str:
        """Wait for the decision, as the head agent; without one in time, decide that there is no
        permission.

        Return `STOPPED` if a signal came first.
        """
        found = read_grant(self.run)
        if found is not None:
            return found
        deadline = time.time() + timeout
        write_atomically(self.run.awaits_grant, f"{deadline:.0f}\n")
        self.events.write("awaits_grant", deadline=deadline)
        self.say(f"waiting for permission to start, for at most {timeout / 60:.0f} min")
        while (found := read_grant(self.run)) is None:
            if self.requests.wants_stop or self.job_start.stop.exists():
                self.run.awaits_grant.unlink(missing_ok=True)
                return STOPPED
            if time.time() > deadline:
                found = decide_grant(self.run, EXPIRED)  # the laptop may have been a moment quicker
                break
            with suppress(OSError):
                os.utime(self.run.awaits_grant)  # as long as this goes on, somebody is waiting
            time.sleep(PAUSE)
        self.events.write("grant", decision=found)
        self.say("permission to start" if found == GRANTED else f"no permission to start: {found}")
        return found

    def follow(self) -> str:
        """Wait for the decision, as any other agent: the head agent makes sure that there is
        one.
        """
        while (found := read_grant(self.run)) is None:
            if self.requests.wants_stop or self.job_start.verdict.exists():
                return STOPPED
            time.sleep(PAUSE)
        return found
