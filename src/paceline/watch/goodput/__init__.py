"""How a run spent its wall time, computed from its events.

    queued    submitted or requeued, but not yet started
    starting  an agent runs, but its ranks have not reached a normal step
    running   ranks run, but their script has no step boundaries
    training  steps that did not have to be repeated, and what the script does between them, such as
    evaluation saving    time for which saves blocked training
    lost      repeated steps, and the time until a failed or hung rank was noticed
    idle      the rest: waiting before a restart, shutting down

The parts of `starting` and `training` are in `parts`. All sum to the wall time: from the first
event to the end, less the time in which the run was over before somebody resumed it.
"""

from paceline.watch.goodput.division import PARTS, SHARES, UNMEASURED, Span
from paceline.watch.goodput.events import find_end, had_nothing_left, had_session, read_events
from paceline.watch.goodput.goodput import Goodput, compute_goodput
from paceline.watch.goodput.run_goodput import last_output, read_goodput

__all__ = [
    "PARTS",
    "SHARES",
    "UNMEASURED",
    "Goodput",
    "Span",
    "compute_goodput",
    "find_end",
    "had_nothing_left",
    "had_session",
    "last_output",
    "read_events",
    "read_goodput",
]
