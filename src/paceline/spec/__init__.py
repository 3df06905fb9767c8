"""What was asked: frozen, validated data from `paceline.toml` and the command line."""

from paceline.spec.job import Job, Program
from paceline.spec.load import Flag, load_job

__all__ = ["Flag", "Job", "Program", "load_job"]
