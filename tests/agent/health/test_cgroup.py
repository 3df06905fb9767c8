"""Control groups: limits of memory, processes that were killed for it, and limits of CPU time."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.agent.health.cgroup import cpu_quota, memory_limit, out_of_memory_kills

HUGE = f"{2**63 - 4096}\n"


def machine(folder: Path, groups: str, files: dict[str, str]) -> tuple[Path, Path]:
    (folder / "proc/self").mkdir(parents=True)
    (folder / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        path = folder / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "proc", folder / "sys"


@pytest.mark.parametrize(
    ("groups", "files", "limit"),
    [
        ("0::/job/step\n", {"job/memory.max": "500\n", "job/step/memory.max": "max\n"}, 500),
        ("0::/job/step\n", {"job/memory.max": "500\n", "job/step/memory.max": "400\n"}, 400),
        ("0::/\n", {}, None),
        (
            "4:memory:/job\n0::/\n",
            {"memory/job/memory.limit_in_bytes": "700\n", "memory/memory.limit_in_bytes": HUGE},
            700,
        ),
        ("9:name=systemd:/a:b\n4:cpu,memory:/\n", {"memory/memory.limit_in_bytes": HUGE}, None),
    ],
)
def test_memory_limits(
    tmp_path: Path, groups: str, files: dict[str, str], limit: int | None
) -> None:
    assert memory_limit(*machine(tmp_path, groups, files)) == limit


@pytest.mark.parametrize(
    ("groups", "files"),
    [
        (
            "0::/slurm/job_7/step_0\n",
            {
                "slurm/memory.max": "max\n",
                "slurm/memory.events": "oom 9\noom_kill 9\n",
                "slurm/job_7/memory.max": "500\n",
                "slurm/job_7/memory.events": "low 0\noom 2\noom_kill 2\n",
                "slurm/job_7/step_0/memory.max": "max\n",
            },
        ),
        (
            "4:memory:/job_7\n",
            {
                "memory/job_7/memory.limit_in_bytes": "700\n",
                "memory/job_7/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
                "memory/memory.limit_in_bytes": HUGE,
                "memory/memory.oom_control": "oom_kill 9\n",
            },
        ),
    ],
)
def test_processes_of_the_job_that_were_killed(
    tmp_path: Path, groups: str, files: dict[str, str]
) -> None:
    assert out_of_memory_kills(*machine(tmp_path, groups, files)) == 2, (
        "not those of other jobs, in the groups above"
    )


@pytest.mark.parametrize(
    ("groups", "prefix"),
    [("0::/job/step\n", "job/step"), ("3:cpu,cpuacct:/job/step\n", "cpu/job/step")],
)
def test_periods_in_which_the_cpu_time_was_used_up(
    tmp_path: Path, groups: str, prefix: str
) -> None:
    files = {f"{prefix}/cpu.stat": "nr_periods 40\nnr_throttled 30\nthrottled_time 5\n"}
    assert cpu_quota(*machine(tmp_path, groups, files)) == (40, 30)
    assert cpu_quota(tmp_path / "nothing", tmp_path) == (0, 0)
