"""Everything about one run: what `paceline show`, `paceline top`, the browser and a report show."""

from paceline.watch.details.attempts import AttemptDetails, Failure, JobStartDetails
from paceline.watch.details.nodes import NodeDetails, RankDetails
from paceline.watch.details.run_details import (
    CheckpointDetails,
    GoodputDetails,
    RunDetails,
    read_details,
    renew_numbers,
)
from paceline.watch.goodput import Span

__all__ = [
    "AttemptDetails",
    "CheckpointDetails",
    "Failure",
    "GoodputDetails",
    "JobStartDetails",
    "NodeDetails",
    "RankDetails",
    "RunDetails",
    "Span",
    "read_details",
    "renew_numbers",
]
