"""How fast nodes and links are, by the fitness check of the run or one that was made just now."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.contract.files.foreign_records import make, read_object
from paceline.contract.findings import GOOD, NOTE, PROBLEM, WARNING, Finding
from paceline.contract.fitness.judgement import Judgement, expected_between, expected_within, judge
from paceline.contract.fitness.measurement import Measurement
from paceline.watch.diagnosis.evidence import Evidence

DOCS = "docs/troubleshooting.md"


def check_fitness(evidence: Evidence) -> list[Finding]:
    """Repeat what the fitness check of the newest job start has found."""
    try:
        record = read_object(evidence.folder.fitness)
        measured = [make(Measurement, each) for each in record["ranks"]]
        found = [
            make(Judgement, {**each, "evidence": tuple(map(str, each["evidence"]))})
            for each in record["found"]
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []
    return describe(measured, found)


def describe_measurements(measured: Sequence[Measurement]) -> list[Finding]:
    """Judge measurements that were made just now."""
    return describe(measured, judge(measured))


def describe(measured: Sequence[Measurement], found: Sequence[Judgement]) -> list[Finding]:
    if not measured:
        return []
    findings = [_finding(each) for each in found]
    unfinished = [each for each in measured if not each.complete]
    if unfinished and not any(each.unfit for each in found):
        facts = tuple(
            f"rank {each.rank} on {each.host}: {each.error or 'not finished within 30 s'}"
            for each in unfinished[:8]
        )
        findings.append(
            Finding(
                "links",
                WARNING,
                "The ranks could not exchange data in the fitness check.",
                "Check the network between these nodes, and the variables of the interface.",
                evidence=facts,
                docs=f"{DOCS}#the-wrong-interface-or-address",
            )
        )
    speeds = summarize(measured)  # also beside what is slow: a reader wants to compare
    return (
        [*findings, Finding("fitness", NOTE if findings else GOOD, speeds)]
        if speeds or not findings
        else findings
    )


def _finding(each: Judgement) -> Finding:
    level, about = (PROBLEM, "slow node") if each.unfit else (WARNING, "links")
    return Finding(
        about,
        level,
        f"{each.host}: {each.text}.",
        f"Exclude the node (--exclude {each.host}) and report it; a run with --fitness does this "
        "automatically."
        if each.unfit
        else "Compare with other nodes, and see `nvidia-smi topo -m` and `ibstat` there.",
        evidence=tuple(map(str, each.evidence)),
        docs=f"{DOCS}#a-slow-node",
    )


def summarize(measured: Sequence[Measurement]) -> str:
    """Return the speeds in one line, beside what the link types should give."""
    speeds = [each.tflops for each in measured if each.tflops > 0]
    parts = (
        [
            f"{len(speeds)} x {measured[0].device} "
            f"{_range([1000 * each for each in speeds], 'GFLOP/s')}"
        ]
        if speeds
        else []
    )
    for name, values, expected in (
        (
            "within a node",
            [each.within for each in measured if each.within],
            expected_within(measured[0]),
        ),
        (
            "between nodes",
            [each.between for each in measured if each.between],
            expected_between(measured[0]),
        ),
    ):
        if values:
            about = f" (about {expected:.1f} expected)" if expected else ""
            parts.append(f"all-reduce {name} {_range(values, 'GB/s')}{about}")
    return ", ".join(parts)


def _range(values: Sequence[float], unit: str) -> str:
    low, high = min(values), max(values)
    return f"{low:.3g} {unit}" if high <= 1.05 * low else f"{low:.3g} to {high:.3g} {unit}"
