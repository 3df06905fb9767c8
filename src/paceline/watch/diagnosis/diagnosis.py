"""The diagnosis of a run: all checks, in the order in which one problem explains another."""

from __future__ import annotations

from collections.abc import Callable

from paceline.contract.findings import GOOD, PROBLEM, Finding
from paceline.watch.diagnosis.arrival import check_answers, check_arrival, check_lost, check_silence
from paceline.watch.diagnosis.disk import check_disk
from paceline.watch.diagnosis.evidence import Evidence
from paceline.watch.diagnosis.flight_recorder import check_flight_recorder
from paceline.watch.diagnosis.hang import check_hang
from paceline.watch.diagnosis.interfaces import check_interfaces
from paceline.watch.diagnosis.out_of_memory import check_memory
from paceline.watch.diagnosis.pace import check_data, check_stragglers
from paceline.watch.diagnosis.resources import (
    check_cores,
    check_gpu_health,
    check_gpus,
    check_versions,
)
from paceline.watch.diagnosis.run_error import check_failure, mention_failure
from paceline.watch.diagnosis.speed import check_fitness

Check = Callable[[Evidence], list[Finding]]

# What a run cannot do without.
CAUSES: tuple[Check, ...] = (
    check_silence,
    check_arrival,
    check_versions,
    check_gpus,
    check_gpu_health,
    check_interfaces,
    check_lost,
    check_memory,
    check_disk,
)
PACE: tuple[Check, ...] = (check_fitness, check_cores, check_data, check_stragglers)
# What those lead to: a problem here is news only if nothing explains it yet.
CONSEQUENCES: tuple[Check, ...] = (check_flight_recorder, check_hang, check_failure)


def diagnose(evidence: Evidence) -> list[Finding]:
    """Return what is wrong, problems first, and what was checked and is fine."""
    found = _queued(evidence)
    for check in CAUSES:
        found += check(evidence)
    if not any(each.level == PROBLEM for each in found):
        found += check_answers(evidence)
    for check in PACE:
        found += check(evidence)
    for check in CONSEQUENCES:
        explained = any(each.level == PROBLEM for each in found)
        found += [each for each in check(evidence) if each.level != PROBLEM or not explained]
    found = mention_failure(found, evidence)
    order = {PROBLEM: 0, GOOD: 2}
    # A good word about something that another check complains of would confuse.
    bad = {each.about for each in found if each.level != GOOD}
    found = [each for each in found if each.level != GOOD or each.about not in bad]
    return sorted(found, key=lambda each: order.get(each.level, 1))


def _queued(evidence: Evidence) -> list[Finding]:
    record = evidence.record
    if record.status in ("queued", "held"):
        return [
            Finding(
                "queue",
                GOOD,
                f"the job is {record.status}: {record.detail or 'Slurm has not said why'}",
            )
        ]
    return []
