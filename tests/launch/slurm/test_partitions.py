"""Parse what Slurm reports about partitions and job states."""

from __future__ import annotations

from paceline.slurm.job_states import ENDED, STATES, UNKNOWN, JobState, normalize_state
from paceline.slurm.partitions import SEPARATOR, fair_cpus, parse_gres, parse_sinfo
from paceline.ui.web.app import _partition as describe

A100, V100 = "gpu:a100:4(S:0-1)", "gpu:v100:2,lustre:1"
NONE, TAKEN = "gpu:a100:0(IDX:N/A)", "gpu:a100:3(IDX:0-1,3)"
ROWS = (
    "main*|up|infinite|3|64|512000|{0}|{2}|0/192/0/192|idle|1-infinite",
    "main*|up|infinite|1|64|512000|{0}|{3}|48/16/0/64|mixed|1-infinite",
    "main*|up|infinite|2|32|256000|{1}|(null)|0/0/64/64|down*|1-infinite",
    "short|down|1:00:00|4|64|512000|(null)|(null)|0/256/0/256|idle~|1-2",
    "garbled",
)
SINFO = "\n".join(
    row.format(A100, V100, NONE, TAKEN).replace("|", f"          {SEPARATOR}") for row in ROWS
)


def test_partitions_are_parsed_by_field() -> None:
    main, short = parse_sinfo(SINFO)
    assert (main.name, main.is_default, main.max_time, main.nodes) == ("main", True, None, 6)
    assert main.gpu_types == {"a100": 4, "v100": 2}
    assert [kind.usable for kind in main.kinds] == [True, True, False]
    assert (
        main.count_nodes(gpus=4),
        main.count_nodes(gpus=1, gpu_type="v100"),
        main.count_nodes(gpus=8),
    ) == (4, 2, 0)
    assert (short.is_up, short.max_time, short.max_nodes) == (False, 3600, 2)
    # The smallest share over all suitable nodes: 64 cores for 4 GPUs, 32 for 2.
    assert fair_cpus([main], gpus=2, gpu_type=None, nproc=2) == 16
    assert fair_cpus([], gpus=2, gpu_type=None, nproc=2) == 1


def test_only_nodes_that_work_have_something_free() -> None:
    main, short = map(describe, parse_sinfo(SINFO))
    assert (main["partition"], main["time_limit"]) == ("main (default)", "no limit")
    assert (main["nodes"], main["idle_nodes"], main["cpus"], main["free_cpus"]) == (6, 3, 256, 208)
    assert main["gpus"] == [{"kind": "a100", "count": 16, "free": 13}]
    assert (short["state"], short["idle_nodes"], short["gpus"]) == ("down", 4, [])
    assert parse_sinfo("slurm_load_partitions: something\n\n") == []


def test_gpus_with_and_without_a_type() -> None:
    assert parse_gres("gpu:8") == parse_gres("gpu:(null):8(IDX:0-7)") == {"": 8}
    assert parse_gres("gpu:a100:3(IDX:0-1,3),gpu:2") == {"a100": 3, "": 2}


def test_states_are_normalized_and_unknown_ones_shown() -> None:
    assert normalize_state("CANCELLED by 1000") == "CANCELLED"
    assert normalize_state("RUNNING+") == "RUNNING"
    strange = JobState("1", "TELEPORTING")
    assert (strange.label, strange.phase) == ("teleporting", UNKNOWN)
    assert {phase for _, phase in STATES.values()} >= {ENDED}
