"""Why a job waits, in plain words, and when Slurm expects it to start. Unknown reasons stay as
Slurm writes them.
"""

from __future__ import annotations

import re
import time

from paceline.slurm.job_states.meanings import JobState

TIME_FORMAT = "%Y-%m-%dT%H:%M:%S"

# Slurm's reason -> what it means. {what} is what the job needs: GPUs or nodes.
REASONS = {
    "Priority": "waits for {what}: other jobs come first",
    "Resources": "waits for {what} to become free",
    "BeginTime": "waits for its begin time",
    "Cleaning": "Slurm is cleaning up after its last start",
    "Prolog": "Slurm is preparing its nodes",
    "Dependency": "waits for another job",
    "DependencyNeverSatisfied": "waits for a job that did not succeed",
    "DeadLine": "cannot end before its deadline",
    "JobArrayTaskLimit": "waits for other tasks of its array, which already runs as many at once "
    "as it may",
    "Licenses": "waits for a license",
    "NodeDown": "waits for a node that is down",
    "ReqNodeNotAvail": "waits for nodes that are down, drained or reserved",
    "Nodes required for job are DOWN": "waits for nodes that are down, drained or reserved",
    "Reservation": "waits for its reservation to begin",
    "ReservationDeleted": "its reservation was deleted",
    "InvalidAccount": "its account is not valid",
    "InvalidQOS": "its QOS is not valid",
    "AccountNotAllowed": "its partition does not allow its account",
    "QOSNotAllowed": "its partition or account does not allow its QOS",
    "PartitionConfig": "requests something that its partition does not allow",
    "PartitionDown": "its partition is down: it accepts jobs, but starts none",
    "PartitionInactive": "its partition starts no jobs at the moment",
    "PartitionNodeLimit": "requests more nodes than its partition allows, or too few of them are "
    "up",
    "PartitionTimeLimit": "requests more time than its partition allows",
    "BadConstraints": "no node has everything that it requests",
    "AssociationJobLimit": "your account is already running as many jobs as it may",
    "AssociationResourceLimit": "your account is already using all the resources that it may",
    "AssociationTimeLimit": "your account has used all of its time",
    "JobHeldUser": "held by you",
    "JobHeldAdmin": "held by an administrator",
    "JobHoldMaxRequeue": "held, because Slurm has requeued it as often as it may",
    "launch failed requeued held": "held, because Slurm could not launch it",
}

# Limits such as QOSMaxGRESPerUser, AssocGrpCPUMinutesLimit, QOSMaxJobsPerUserLimit or
# MaxNodePerAccount.
_LIMIT = re.compile(
    r"(?P<who>QOS|Assoc)?(?P<kind>Grp|Max|Min)(?P<what>\w*?)(?P<run>Run)?(?P<minutes>Minutes|Mins)?"
    r"(?:Per(?P<each>User|Account|Job|Node))?(?:Limit|NotSatisfied)?"
)
_THINGS = {
    "GRES": "GPUs",
    "CPU": "cores",
    "Cpu": "cores",
    "CPUs": "cores",
    "Node": "nodes",
    "Mem": "memory",
    "Memory": "memory",
    "Jobs": "jobs",
    "SubmitJobs": "jobs in the queue",
    "Submit": "jobs in the queue",
    "Wall": "time",
    "WallDuration": "time",
    "Billing": "billing units",
    "Energy": "energy",
    "BB": "burst buffer",
    "License": "licenses",
}


def explain_reason(reason: str, *, gpus: bool) -> str:
    """Return why a job waits, from Slurm's reason for it."""
    what = "GPUs" if gpus else "nodes"
    known = REASONS.get(reason) or next(
        (text for name, text in REASONS.items() if reason.startswith(f"{name},")), None
    )
    if known is None:
        return _explain_limit(reason) or reason
    nodes = re.search(r"UnavailableNodes:(\S+)", reason)
    return known.format(what=what) + (f" ({nodes[1]})" if nodes else "")


def _explain_limit(reason: str) -> str:
    match = _LIMIT.fullmatch(reason)
    thing = _THINGS.get(match["what"]) if match else None
    if match is None or thing is None:
        return ""
    who, jobs = "your account" if match["who"] == "Assoc" else "its QOS", "your jobs"
    if match["minutes"]:
        thing = f"{thing.removesuffix('s')} time"
    if match["kind"] == "Min":
        return f"requests fewer {thing} than {who} requires"
    if match["each"] in ("Job", "Node"):
        return f"requests more {thing} than {who} allows per {match['each'].lower()}"
    if match["kind"] == "Grp":
        return f"{who} has reached its limit of {thing}"
    if match["each"] == "Account":
        jobs = "your account's jobs"
    return (
        f"{jobs} have reached the limit of {thing} that {who} sets per "
        f"{(match['each'] or 'User').lower()}"
    )


def expected_start(state: JobState, now: float) -> float | None:
    """Return when Slurm expects a job to start, in seconds since 1970; None if it does not say, or
    if that is past.
    """
    try:
        start = time.mktime(time.strptime(state.start, TIME_FORMAT))
    except (ValueError, OverflowError):
        return None
    return start if start > now else None


def show_start(start: float, now: float) -> str:
    """Return a time to come as people say it: 14:20, Tue 14:20 or 24 Nov 14:20."""
    then = time.localtime(start)
    if then[:3] == time.localtime(now)[:3]:
        return time.strftime("%H:%M", then)
    return time.strftime("%a %H:%M" if start - now < 6 * 86400 else "%d %b %H:%M", then)
