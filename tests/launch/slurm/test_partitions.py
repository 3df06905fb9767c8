"""Parse what Slurm reports about partitions and job states."""

from __future__ import annotations

from paceline.slurm.job_states import ENDED, STATES, UNKNOWN, JobState, normalize_state
from paceline.slurm.partitions import SEPARATOR, fair_cpus, parse_gres, parse_sinfo

SINFO = "\n".join(
    SEPARATOR.join(line)
    for line in (
        (
            "main*",
            "up",
            "infinite",
            "4",
            "64",
            "512000",
            "gpu:a100:4(S:0-1)",
            "(null)",
            "idle",
            "1-infinite",
        ),
        (
            "main*",
            "up",
            "infinite",
            "2",
            "32",
            "256000",
            "gpu:v100:2,lustre:1",
            "old",
            "down*",
            "1-infinite",
        ),
        ("short", "down", "1:00:00", "4", "64", "512000", "(null)", "a,b", "mixed", "1-2"),
        ("garbled",),
    )
)


def test_partitions_are_parsed_by_field() -> None:
    main, short = parse_sinfo(SINFO)
    assert (main.name, main.is_default, main.max_time, main.nodes) == ("main", True, None, 6)
    assert main.gpu_types == {"a100": 4, "v100": 2}
    assert [kind.usable for kind in main.kinds] == [True, False]
    assert (
        main.count_nodes(gpus=4),
        main.count_nodes(gpus=1, gpu_type="v100"),
        main.count_nodes(gpus=8),
    ) == (4, 2, 0)
    assert (short.is_up, short.max_time, short.max_nodes) == (False, 3600, 2)
    assert parse_gres("gpu:8") == {"": 8}
    # The smallest share over all suitable nodes: 64 cores for 4 GPUs, 32 for 2.
    assert fair_cpus([main], gpus=2, gpu_type=None, nproc=2) == 16
    assert fair_cpus([], gpus=2, gpu_type=None, nproc=2) == 1


def test_states_are_normalized_and_unknown_ones_shown() -> None:
    assert normalize_state("CANCELLED by 1000") == "CANCELLED"
    assert normalize_state("RUNNING+") == "RUNNING"
    strange = JobState("1", "TELEPORTING")
    assert (strange.label, strange.phase) == ("teleporting", UNKNOWN)
    assert {phase for _, phase in STATES.values()} >= {ENDED}
