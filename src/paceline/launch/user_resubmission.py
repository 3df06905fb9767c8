"""A run that its user sends back to the queue, with new limits or other arguments.

A job requeues itself: `stop_and_requeue.sh`.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.contract.files.foreign_records import read_object
from paceline.contract.findings import Finding
from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.redaction import REDACTED, redact_text
from paceline.contract.run_folder import SUBMITTING, RunFolder
from paceline.contract.run_path import run_path_of
from paceline.contract.typed_command import to_type
from paceline.errors import EnvironmentProblem, UsageError
from paceline.launch import run_folder as folders
from paceline.launch.checks.job import check_job
from paceline.launch.claims import require_not_running, require_permission
from paceline.launch.done_run import require_work_left
from paceline.launch.job_submission import JobSubmission, Submitted, write_files
from paceline.launch.prepare import EarlierStart, prepare, read_launch_spec
from paceline.slurm import sbatch
from paceline.spec import Flag, Job, Program, load_job
from paceline.spec.load import reload_job

# Settings of a local run that are not about this machine: a job keeps them.
_PORTABLE = ("params", "runtime", "checkpoint", "tracking", "resume", "notify")


@dataclass(frozen=True)
class Typed:
    """What was typed besides the run and the script."""

    flags: Sequence[Flag] = ()
    params: Sequence[str] = ()
    config: Path | None = None
    profile: str | None = None

    def load(
        self, program: Program, cwd: Path, overlay: tuple[Mapping[str, Any], Path] | None = None
    ) -> Job:
        return load_job(
            program,
            flags=self.flags,
            params=self.params,
            config=self.config,
            profile=self.profile,
            cwd=cwd,
            overlay=overlay,
        )


class Resubmission(JobSubmission):
    """A run that is over, to be submitted again."""

    def __init__(
        self, job: Job, folder: RunFolder, earlier: EarlierStart, *, after: Sequence[str] = ()
    ) -> None:
        super().__init__(job, after=after, run_path=run_path_of(folder))
        self.earlier = earlier
        if missing := ", ".join(self._missing_secrets()):
            self.notes.append(
                f"secrets are not stored, so pass these --env variables again if needed: {missing}"
            )

    @property
    def code(self) -> str:
        """Which code the job runs, for people."""
        if self.earlier.keeps_code:
            return "the copy that the run already has; name the script to take a new one"
        if self.job.project.snapshot:
            return f"a new copy of {self.job.folder}"
        return f"{self.job.folder} itself, as it is when the job starts"

    def findings(self) -> list[Finding]:
        job = self.job
        if self.earlier.keeps_code:  # check that script, and not the one in the project
            job = replace(job, cwd=self.run_path.folder.code / os.path.relpath(job.cwd, job.folder))
        return check_job(job, self.plan(self.run_path), self.partitions)

    def submit(self, command: Sequence[str], *, script_only: Path | None = None) -> Submitted:
        """Submit the run again. If Slurm rejects the job, the run folder stays as it was."""
        assert script_only is None, "the command rejected it"
        with _locked(self.run_path.folder):
            return self._submit(command)

    def _submit(self, command: Sequence[str]) -> Submitted:
        folder, job = self.run_path.folder, self.job
        require_not_running(folder)
        known = sbatch.known_jobs(folder)
        self._require_no_unconfirmed_job(known)
        with _restored_on_failure(folder):
            plan = self.plan(self.run_path)
            prepared = prepare(
                job,
                run_path=self.run_path,
                rank_counts=plan.rank_counts,
                launch_spec=plan.launch_spec,
                command=list(command),
                backend="slurm",
                snapshot_required=True,
                compiled=job.environment.kind == "current",
                earlier=self.earlier,
            )
            write_files(plan)
            # the job may start at once; it is back if Slurm rejects the job
            folder.cancelled.unlink(missing_ok=True)
            job_id = self._sbatch(plan, known=known)
        self._note_job(folder, job_id)
        return Submitted(plan, job_id, (*self.notes, *plan.notes, *prepared.notes))

    def _require_no_unconfirmed_job(self, known: Sequence[str]) -> None:
        """Raise an error if a submission that Slurm never confirmed has left a job after all."""
        folder = self.run_path.folder.path
        if not (folder / SUBMITTING).exists():
            return
        job = sbatch.find_job(folder, os.environ, known=known, pauses=(0.0,))
        if job is not None:
            raise UsageError(
                f"Run {folder.name} has job {job}, which Slurm had not confirmed.",
                hint=f"End it: scancel {job}",
            )
        (folder / SUBMITTING).unlink(missing_ok=True)

    def _missing_secrets(self) -> list[str]:
        hidden = _variables(self.earlier.record)
        return [
            name
            for name in hidden
            if hidden[name] == REDACTED and name not in self.job.environment.variables
        ]


def find_resubmission(
    name: str, program: Program | None, *, typed: Typed, cwd: Path, after: Sequence[str] = ()
) -> Resubmission:
    """Find a run by its name, and load its job; without a `program` it is the one that the run
    had.
    """
    here = typed.load(program or Program(""), cwd)
    folder = folders.find_own_run(name, folders.resolve_scratch(here, os.environ))
    old = read_launch_spec(folder)
    if old.trial:
        raise UsageError(
            f"{name} is a trial of a sweep, which manages its own jobs.",
            hint="Run the trials that failed again: paceline sweep --resubmit failed SWEEP",
        )
    require_not_running(folder)
    require_permission(folder)
    note = require_work_left(folder, old, program=program, flags=typed.flags, params=typed.params)
    record = _read_record(folder)
    was_submitted = record.get("backend") == "slurm"
    if was_submitted and (typed.config or typed.profile):
        raise UsageError(
            f"Run {folder.path.name} keeps the settings that it was submitted with, so --config "
            "and --cluster-profile"
            " have no effect.",
            hint="Omit them, and pass only what should change, e.g. --time 8h.",
        )
    project = here if program is not None else _live_project(folder, old, record)
    if was_submitted:
        tables = _recorded_tables(record, old, typed)
        tables["environment"]["setup"] = _restore_setup(
            tables["environment"].get("setup", []), folder.script
        )
        job = reload_job(project, tables, flags=typed.flags, params=typed.params)
    else:
        tables = _portable_tables(_recorded_tables(record, old, typed), record)
        job = replace(
            typed.load(project.program, project.cwd, (tables, folder.run_json)),
            folder=project.folder,
        )
    changes_copy = job.is_typed("project.workdir") or job.is_typed("project.snapshot")
    keeps_code = (
        program is None and _runs_copy(folder, old) and folder.code.is_dir() and not changes_copy
    )
    resubmission = Resubmission(job, folder, EarlierStart(record, old, keeps_code), after=after)
    resubmission.notes += [note] if note else []
    return resubmission


def _read_record(folder: RunFolder) -> dict[str, Any]:
    try:
        record = read_object(folder.run_json)
        if not isinstance(record.get("spec"), dict):
            raise ValueError("it has no settings")
    except (OSError, ValueError) as problem:
        raise EnvironmentProblem(
            f"Cannot read {folder.run_json}: {problem}.", hint="Start a new run."
        ) from None
    return record


def _runs_copy(folder: RunFolder, spec: LaunchSpec) -> bool:
    """Return whether a run's ranks run the copy of the code in its folder."""
    return Path(spec.source).is_relative_to(folder.path)


def _live_project(folder: RunFolder, spec: LaunchSpec, record: Mapping[str, Any]) -> Job:
    """Return the program of a run and its folders, as they were where it was started."""
    project = Path(spec.source)
    if _runs_copy(folder, spec):
        code = record.get("code") or {}
        project = Path(spec.work.get("project") or code.get("folder") or spec.source)

    def live(path: str) -> Path:
        return (
            project / os.path.relpath(path, spec.source)
            if Path(path).is_relative_to(spec.source)
            else Path(path)
        )

    cwd = live(spec.cwd)
    name = spec.program if spec.is_module else os.path.relpath(live(spec.program), cwd)
    return _without_settings(
        Program(name, tuple(spec.args), is_module=spec.is_module), project, cwd
    )


def _without_settings(program: Program, folder: Path, cwd: Path) -> Job:
    from paceline.spec.settings import Tables

    return Job(program, Tables(), folder, cwd)


def _variables(record: Mapping[str, Any]) -> dict[str, str]:
    try:
        return dict(record["spec"]["environment"]["variables"])
    except (KeyError, TypeError, ValueError):
        return {}


def _recorded_tables(record: Mapping[str, Any], old: LaunchSpec, typed: Typed) -> dict[str, Any]:
    """Return the settings of a run, with what its record hides; what it waited for is over."""
    tables = {
        name: dict(values) for name, values in record["spec"].items() if isinstance(values, dict)
    }
    tables["params"] = dict(old.params)
    hidden = [
        name for name, text in _variables(record).items() if text == REDACTED and name in os.environ
    ]
    variables = {**old.variables, **{name: os.environ[name] for name in hidden}}
    tables.setdefault("environment", {})["variables"] = variables
    tables.get("job", {}).pop("dependency", None)
    if _replaces(typed.flags, "job.mem_per_gpu"):
        tables["job"].pop("mem_per_node", None)
    if _replaces(typed.flags, "job.mem_per_node"):
        tables["job"].pop("mem_per_gpu", None)
    return tables


def _portable_tables(tables: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a job keeps of a local run: its name, the variables that were set for it, and
    what is not here's.
    """
    kept = {key: dict(value) for key, value in tables.items() if key in _PORTABLE}
    for key in ("cpu", "backend"):
        kept.get("runtime", {}).pop(key, None)
    if name := tables.get("job", {}).get("name"):
        kept["job"] = {"name": name}
    # ranks had more here, such as CUDA_VISIBLE_DEVICES
    variables = tables["environment"]["variables"]
    kept["environment"] = {
        "variables": {key: variables[key] for key in _variables(record) if key in variables}
    }
    return kept


def _restore_setup(setup: Iterable[str], script: Path) -> list[str]:
    """Return lines of `setup` with the secrets that the record hides, from the script that was
    submitted.
    """
    lines, position = [], 0
    for shown in setup:
        if REDACTED not in shown:
            lines.append(shown)
            continue
        text = script.read_text(encoding="utf-8") if script.exists() else ""
        parts = (re.escape(part) for part in shown.split(REDACTED))
        found = re.compile(f"^{'.+?'.join(parts)}$", re.MULTILINE | re.DOTALL).search(
            text, position
        )
        if found is None or redact_text(found[0]) != shown:
            raise UsageError(
                f"{script} has no line {shown}, so the secret in this line of `setup` is no "
                "longer known.",
                hint="Start a new run, and keep the secret in a file that you pass with "
                "`--secret-file`.",
            )
        lines.append(found[0])
        position = found.end()
    return lines


def _replaces(flags: Iterable[Flag], key: str) -> bool:
    return any(flag.key == key and flag.value is not None for flag in flags)


@contextmanager
def _locked(folder: RunFolder) -> Iterator[None]:
    """Keep out other commands that submit this run. A command that is killed leaves no lock."""
    try:
        folder.events.mkdir(exist_ok=True)
        file = open(folder.events / "launch.jsonl", "a", encoding="utf-8")  # noqa: SIM115 (closed below)
    except OSError as error:
        raise folders.path_error("write the run folder", folder.path, error) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"Another command is submitting run {folder.path.name} now.",
                hint=f"To see its status: {to_type(f'show {folder.path.name}')}",
            ) from None
        except OSError:  # a file system without locks
            pass
        yield


@contextmanager
def _restored_on_failure(folder: RunFolder) -> Iterator[None]:
    """Undo what the body has changed in a run folder if it fails, unless there may be a job, which
    needs it.
    """
    paths = (
        folder.run_json,
        folder.launch_spec,
        folder.script,
        folder.shell_library,
        folder.shell_setup,
        folder.environment,
        folder.run_half,
        folder.code,
        folder.cancelled,
    )
    before = {path: _Kept.read(path) for path in paths}
    try:
        yield
    except BaseException as error:
        if not (folder.path / SUBMITTING).exists():
            for path, kept in before.items():
                kept.restore(path)
        if isinstance(error, OSError):
            raise folders.path_error("write the run folder", folder.path, error) from None
        raise


@dataclass(frozen=True)
class _Kept:
    """A file or link as it was; empty if there was none."""

    content: bytes | None = None
    mode: int = 0
    target: str = ""

    @classmethod
    def read(cls, path: Path) -> _Kept:
        if path.is_symlink():
            return cls(target=os.readlink(path))
        try:
            return cls(path.read_bytes(), stat.S_IMODE(path.stat().st_mode))
        except FileNotFoundError:
            return cls()

    def restore(self, path: Path) -> None:
        path.unlink(missing_ok=True)  # it may be a link to a file that others share
        if self.target:
            path.symlink_to(self.target)
        elif self.content is not None:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, self.mode)
            with open(descriptor, "wb") as file:
                file.write(self.content)
