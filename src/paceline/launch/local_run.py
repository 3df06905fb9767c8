"""A run on this machine, from its job to a folder that is ready for its agents."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

from paceline.launch.claims import claim_run
from paceline.launch.local_plan import LocalPlan, plan_local
from paceline.launch.machine import detect_machine, interpreter
from paceline.launch.run_folder import open_run_folder
from paceline.launch.submission import LOCAL, EarlierRun, Submission, fill_folder
from paceline.spec.job import Job


class LocalRun(Submission):
    """A run to start here, new or again. Nothing is written before `prepare`."""

    def __init__(
        self,
        job: Job,
        *,
        earlier: EarlierRun | None = None,
        in_copy: bool = False,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """`variables` are set for the ranks, besides those of the job."""
        in_copy = in_copy or (earlier is not None and earlier.keeps_code)
        super().__init__(job, in_copy=in_copy, earlier=earlier)
        plan = plan_local(
            self.job,
            run_path=self.run_path,
            machine=detect_machine(os.environ),
            python=interpreter(self.job),
            environ=os.environ,
            old=earlier.launch_spec if earlier is not None else None,
            file_secrets=self.secrets,
            path_in_job=self.path_in_job,
        )
        spec = plan.launch_spec
        spec = replace(spec, variables={**spec.variables, **(variables or {})})
        if earlier is not None:
            spec = replace(spec, trial=earlier.launch_spec.trial)
        self.plan: LocalPlan = replace(plan, launch_spec=spec)

    def prepare(self, command: Sequence[str]) -> tuple[str, ...]:
        """Open the run folder and fill it; return notes for the user. `command` is recorded as what
        the user typed.
        """
        plan, folder, earlier = self.plan, self.folder, self.earlier
        if plan.launch_spec.data:
            from paceline.launch.checks.data import require_data

            require_data(self.job, self.run_path, os.environ)
        if earlier is not None:
            claim_run(folder)
        with open_run_folder(self.run_path, is_new=earlier is None):
            folder.cancelled.unlink(missing_ok=True)
            notes = fill_folder(
                self.job,
                run_path=self.run_path,
                launch_spec=plan.launch_spec,
                command=command,
                backend=LOCAL,
                in_copy=self.in_copy,
                earlier=earlier,
            )
            if earlier is None:
                claim_run(folder)
        return (*plan.notes, *self.notes, *notes)
