"""What the user asked for: frozen, validated data from `paceline.toml` and the command line."""

from paceline.spec.job import Job, Program
from paceline.spec.load import load_job
from paceline.spec.typed_flags import Flag

__all__ = ["Flag", "Job", "Program", "load_job"]
