"""How a job's script will be asked to stop, as far as its text shows."""

from __future__ import annotations

from paceline.contract.frameworks import describe_contract, find_preset, opens_session, read_sources
from paceline.spec.job import Job


def describe_stop(job: Job) -> str:
    """Return the stop contract in one line; empty for a script that uses the runtime or cannot be
    read.
    """
    program, settings = job.program, job.resume
    name = program.name if program.is_module else str(job.cwd / program.name)
    texts = read_sources(name, is_module=program.is_module, import_path=[str(job.cwd)])
    if not texts or opens_session(texts[0]):
        return ""
    preset = None if settings.stop_signal else find_preset(texts)
    line = describe_contract(settings.stop_signal or "", settings.saved_exit_code, preset)
    if preset is None or settings.requeue == "always" or preset.can_resume(texts, program.args):
        return line
    return f"{line}; not before the time limit, as the script never sets {preset.resumes}"
