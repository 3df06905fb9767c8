"""Runs on this machine, from the job to a prepared run folder: new and resumed ones."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from paceline.contract.files.foreign_records import read_object
from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.redaction import REDACTED
from paceline.contract.run_folder import RunFolder, write_atomically
from paceline.contract.run_path import RunPath, run_path_of
from paceline.launch import run_folder as folders
from paceline.launch.claims import claim_run, require_not_running, require_permission
from paceline.launch.local.machine import detect_machine, interpreter
from paceline.launch.plan.local import LocalPlan, launch_spec_text, plan_local
from paceline.launch.plan.run_record import resumed_record
from paceline.launch.prepare import prepare, read_launch_spec, repair_code
from paceline.launch.secrets.secrets import read_secrets
from paceline.spec import Job, Program


class NewRun:
    """A run to start here. Nothing is written before `prepare`."""

    snapshot_required = False  # ranks work in the live project

    def __init__(self, job: Job) -> None:
        self.job = job = _resolve_start(job)
        self.machine, self.python = detect_machine(os.environ), interpreter(job)
        self.secrets = read_secrets(job, os.environ)
        self.plan = self._plan(folders.new_run_path(job, os.environ))
        self._keep_code: Callable[[], list[str]] = list

    def _plan(self, run_path: RunPath) -> LocalPlan:
        return plan_local(
            self.job,
            run_path=run_path,
            machine=self.machine,
            python=self.python,
            environ=os.environ,
            file_secrets=self.secrets,
        )

    def prepare(self, command: Sequence[str], *, code_later: bool = False) -> tuple[str, ...]:
        """Create the run folder; return notes for the user. `command` is recorded as what the user
        typed.

        With `code_later`, call `keep_code` when the agents have started: they do not need the copy
        of the code.
        """
        if self.plan.launch_spec.data:
            from paceline.launch.checks.data import require_data

            require_data(self.job, self.plan.run_path, os.environ)
        with folders.create_run_folder(self.plan.run_path) as run_path:
            self.plan = plan = self._plan(run_path)
            prepared = prepare(
                self.job,
                run_path=run_path,
                rank_counts=plan.rank_counts,
                launch_spec=plan.launch_spec,
                command=list(command),
                backend="local",
                snapshot_required=self.snapshot_required,
                code_later=code_later,
            )
            claim_run(run_path.folder)
        self._keep_code = prepared.keep_code
        return (*plan.notes, *prepared.notes)

    def keep_code(self) -> list[str]:
        """Copy the code into the run folder, after `prepare` with `code_later`; return notes for
        the user.
        """
        try:
            return self._keep_code()
        except OSError as error:  # the run itself goes on
            return [f"the code of this run could not be copied: {error.strerror or error}"]


class ResumedRun:
    """An existing run to resume here, with what was typed this time."""

    def __init__(
        self, job: Job, folder: RunFolder, launch_spec: LaunchSpec, *, new_program: bool = False
    ) -> None:
        if job.is_typed("runtime.start_from"):
            job = _resolve_start(job)
        self.job, self.folder, self.new_program = job, folder, new_program
        self.plan = plan_local(
            job,
            run_path=run_path_of(folder),
            machine=detect_machine(os.environ),
            python=interpreter(job),
            old=launch_spec,
            environ=os.environ,
            file_secrets=read_secrets(job, os.environ),
        )

    def prepare(self, command: Sequence[str], *, code_later: bool = False) -> tuple[str, ...]:
        """Write the new launch spec and record; return notes for the user."""
        folder = self.folder
        claim_run(folder)
        folder.cancelled.unlink(missing_ok=True)
        try:
            write_atomically(
                folder.launch_spec, launch_spec_text(self.plan.launch_spec), mode=0o600
            )
            self._write_record(command)
        except OSError as error:
            raise folders.path_error("write the run folder", folder.path, error) from None
        missing = ", ".join(self._missing_secrets())
        note = (
            "secrets are not stored, so pass these --env variables again if you need them: "
            f"{missing}"
        )
        return (*self.plan.notes, *((note,) if missing else ()))

    def keep_code(self) -> list[str]:
        """Copy the code if the run has no copy because its first command was killed; return notes
        for the user.
        """
        try:
            return repair_code(self.job, self.plan.run_path, new_program=self.new_program)
        except (OSError, ValueError) as error:  # the run itself goes on
            return [
                "the code of this run could not be copied: "
                f"{getattr(error, 'strerror', None) or error}"
            ]

    def _write_record(self, command: Sequence[str]) -> None:
        try:
            before = read_object(self.folder.run_json)
        except (OSError, ValueError):  # the run goes on without it
            return
        text = resumed_record(
            before,
            self.job,
            self.plan.launch_spec,
            command=command,
            time=time.time(),
            new_program=self.new_program,
        )
        write_atomically(self.folder.run_json, text)

    def _missing_secrets(self) -> list[str]:
        """Return the secrets that `--env` gave the run when it was started, and that it lacks
        now.
        """
        try:
            variables = read_object(self.folder.run_json)["spec"]["environment"][
                "variables"
            ].items()
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return []
        hidden = [name for name, text in variables if text == REDACTED]
        return [name for name in hidden if name not in self.plan.secrets and name not in os.environ]


def _resolve_start(job: Job) -> Job:
    """Return the job with the absolute path of what it starts from, if it does."""
    if job.runtime.start_from is None and not job.runtime.start_continue:
        return job
    from paceline.launch.checks.start_source import resolve_start

    return resolve_start(job, os.environ)


def find_resumed_run(
    name: str, program: Program | None, *, load: Callable[[Program], Job], cwd: Path
) -> ResumedRun:
    """Find a run by its name, and load its job; without a `program` it is the one that the run
    had.
    """
    job = load(program or Program(""))
    folder = folders.find_own_run(name, folders.resolve_scratch(job, os.environ))
    spec = read_launch_spec(folder)
    require_not_running(folder)
    require_permission(folder)
    if program is None:
        job = load(Program(spec.program, tuple(spec.args), is_module=spec.is_module))
        return ResumedRun(job, folder, spec)
    script = program.name if program.is_module else str(cwd / program.name)
    spec = replace(
        spec,
        program=script,
        args=list(program.args),
        is_module=program.is_module,
        import_path=[str(cwd)] if program.is_module else [],
        cwd=str(cwd),
        source=str(job.folder),
        work={},
    )
    return ResumedRun(job, folder, spec, new_program=True)
