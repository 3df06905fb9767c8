"""Slurm's reasons for waiting, in plain words."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from paceline.slurm.job_states import JobState
from paceline.watch.records import read_record
from paceline.watch.run_status import REASONS, explain_reason, show_start
from tests.watch.test_records import make_run

NOW = time.mktime((2026, 11, 17, 12, 0, 0, 0, 0, -1))  # a Tuesday, in the time zone of this machine


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("Priority", "waits for GPUs: other jobs come first"),
        ("Resources", "waits for GPUs to become free"),
        ("QOSMaxGRESPerUser", "a limit of its QOS: QOSMaxGRESPerUser"),
        ("MaxNodePerAccount", "a limit of its QOS: MaxNodePerAccount"),
        ("AssocGrpCPUMinutesLimit", "a limit of your account: AssocGrpCPUMinutesLimit"),
        (
            "ReqNodeNotAvail, UnavailableNodes:n[1-2]",
            "waits for nodes that are down, drained or reserved (n[1-2])",
        ),
        (
            "ReqNodeNotAvail, May be reserved for other job",
            "waits for nodes that are down, drained or reserved",
        ),
        (
            "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions",
            "waits for nodes that are down, drained or reserved",
        ),
        (
            "PartitionNodeLimit",
            "requests more nodes than its partition allows, or too few of them are up",
        ),
        ("AWholeNewReason", "AWholeNewReason"),
        ("", ""),
    ],
)
def test_reasons_in_plain_words(reason: str, words: str) -> None:
    assert explain_reason(reason, gpus=True) == words


def test_a_job_without_gpus_waits_for_nodes() -> None:
    assert explain_reason("Resources", gpus=False) == "waits for nodes to become free"
    assert not [name for name in REASONS if "{" in explain_reason(name, gpus=False)]


@pytest.mark.parametrize(
    ("start", "shown"),
    [
        ("2026-11-17T14:20:00", "; expected to start 14:20"),
        ("2026-11-18T09:05:00", "; expected to start Wed 09:05"),
        ("2026-12-24T09:05:00", "; expected to start 24 Dec 09:05"),
        ("2026-11-17T11:59:00", ""),  # Slurm has not planned it again yet
        ("N/A", ""),
        ("\x1b[31m", ""),
    ],
)
def test_the_estimate_is_part_of_the_detail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: str, shown: str
) -> None:
    folder = make_run(tmp_path)
    folder.run_json.write_text(json.dumps({"spec": {"job": {"gpus_per_node": 8}}}))
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: NOW)
        record = read_record(
            folder, lambda jobs: {"7": JobState("7", "PENDING", "Resources", start=start)}
        )
        assert record.detail == f"waits for GPUs to become free{shown}"


def test_a_start_on_another_day_has_its_day() -> None:
    assert show_start(NOW + 60, NOW) == "12:01"
    assert show_start(NOW + 86400, NOW) == "Wed 12:00"
