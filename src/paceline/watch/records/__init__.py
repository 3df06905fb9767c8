"""Records of runs, from their folders and, for jobs, from a single query to the scheduler."""

from paceline.watch.records.fetched import typed_there
from paceline.watch.records.reader import (
    RUN_FIELDS,
    QueryStates,
    find_runs,
    iterate_records,
    read_json,
    read_record,
    read_records,
    record_maker,
)
from paceline.watch.records.reasons import BY_YOU
from paceline.watch.records.record import Record
from paceline.watch.records.run_status import (
    LOST,
    OVER,
    STATUSES,
    killed_shell,
    newest_verdict,
    unsaved_state,
)

__all__ = [
    "BY_YOU",
    "LOST",
    "OVER",
    "RUN_FIELDS",
    "STATUSES",
    "QueryStates",
    "Record",
    "find_runs",
    "iterate_records",
    "killed_shell",
    "newest_verdict",
    "read_json",
    "read_record",
    "read_records",
    "record_maker",
    "typed_there",
    "unsaved_state",
]
