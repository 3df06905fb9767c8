"""Job arrays: the script, whose tasks run a sweep's trials; the cluster's limits; submission."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.errors import ClusterError, SpecError
from paceline.slurm import commands as slurm
from paceline.slurm import sbatch
from paceline.slurm.batch_script import Script, ScriptPlan, launch_lines, source_library
from paceline.slurm.sbatch import BatchJob
from paceline.slurm.sbatch_directives import Directive, TaskCounts, file_pattern, render
from paceline.spec.job import Job
from paceline.spec.quantities import slurm_size
from paceline.spec.shell_text import quote


@dataclass(frozen=True)
class Trials:
    """What the tasks of an array run."""

    sweep: Path  # the sweep's folder
    pack: int = 1  # trials side by side in one job

    def task_counts(self, job: Job, counts: TaskCounts) -> TaskCounts:
        """Return what a task asks for, so that each of its trials has `counts`."""
        if self.pack == 1:
            return counts
        if counts.nodes > 1:
            raise SpecError(
                f"{job.source('job.nodes')} is {counts.nodes}, but --pack puts {self.pack} trials "
                "on one node.",
                hint="Leave --pack out, or ask for one node per trial.",
            )
        if job.launch.style == "mpirun":
            raise SpecError(
                f'{job.source("launch.style")} is "mpirun", which takes the whole job, but --pack '
                f"is {self.pack}.",
                hint="Leave --pack out, or use another style.",
            )
        return replace(
            counts,
            nproc=counts.nproc * self.pack,
            gpus=counts.gpus * self.pack,
            tasks_per_node=counts.tasks_per_node * self.pack,
        )

    def directives(
        self, job: Job, directives: Sequence[Directive], folder: Path
    ) -> list[Directive]:
        """Turn the directives of a single run into those of an array's tasks."""
        log = file_pattern(str(folder / "logs")) + "/%A_%a.log"
        changed = {"output": log}
        memory = job.resources.mem_per_node
        if memory is not None and self.pack > 1:
            changed["mem"] = slurm_size(memory * self.pack)
        return [
            Directive(each.option, changed[each.option]) if each.option in changed else each
            for each in directives
        ]


def array_script(plan: ScriptPlan, trials: Trials) -> Script:
    """Return the script of a sweep. `plan.task_counts` are those of one trial, `plan.directives`
    those of a task.
    """
    launch = launch_lines(
        _share(plan, trials), "$paceline_submission", rendezvous=' "$paceline_trial"'
    )
    return Script(
        title=plan.title,
        advice=[
            "Each task runs the trials on its line of a list. To submit it: sbatch --array=0-9 "
            "job.sbatch tasks-1"
        ],
        directives=render(plan.directives),
        start=[
            f"paceline_sweep={quote(str(trials.sweep))} # holds everything about this sweep",
            f"paceline_submission={quote(str(plan.folder.path))} # holds everything about this "
            "submission",
            f"paceline_python={quote(plan.python)}",
            *source_library("$paceline_submission"),
            'paceline_start_task "$paceline_sweep" "$paceline_submission" '
            f'"${{1:-tasks-1}}"{plan.start_options}',
        ],
        environment=plan.environment.lines("$paceline_submission"),
        launch=[
            "# Paceline opens and closes each trial on this host; in between, the trial runs on "
            "the nodes.",
            f'paceline_run_half() {{ {_run_half(plan)} "$@"; }}',
            "paceline_launch_trial() {",
            *(f"    {line}" for line in launch),
            "}",
            f"paceline_run_trials {trials.pack}"
            + (" # side by side" if trials.pack > 1 else " # at a time"),
            "paceline_finish_task",
        ],
    )


def _run_half(plan: ScriptPlan) -> str:
    """Return how the run half is called on the batch host: in the container, where there is one."""
    entry = [*plan.container.prefix]
    if plan.container.srun_options:
        entry = ["srun --export=ALL --nodes=1 --ntasks=1 --mpi=none", *plan.container.srun_options]
    return " ".join([*entry, '"$paceline_python" "$paceline_submission/paceline.zip"'])


def _share(plan: ScriptPlan, trials: Trials) -> ScriptPlan:
    """Limit each trial to its share of a job that several trials share."""
    if trials.pack == 1:
        return plan
    options = [*plan.step_options, "--exact"]
    if not plan.step_options:
        gres = next((each.value or "" for each in plan.directives if each.option == "gres"), "")
        options.append(
            f"--gres={gres.rpartition(':')[0]}:{plan.task_counts.gpus}" if gres else "--gres=none"
        )
    # A step takes all memory of its job unless you limit it, and the others would wait for it.
    memory = f"${{SLURM_MEM_PER_NODE:+--mem=$((SLURM_MEM_PER_NODE / {trials.pack}))M}}"
    return replace(plan, step_options=options, step_shell=[memory])


DEFAULT_ARRAY_SIZE = 1001  # Slurm's default for MaxArraySize
# count the cluster's jobs only if the submission needs more than a tenth of MaxJobCount
FRACTION = 10
# How sbatch rejects a job because of a limit on the number of jobs.
JOB_LIMIT_REACHED = re.compile(
    r"submit limit|MaxSubmit|job count|MaxJobCount|limit on jobs|Resource temporarily unavailable",
    re.IGNORECASE,
)


def array_size_limit() -> int:
    """Return the largest number of tasks that one array may have."""
    config = _read_config()
    size = int(config.get("MaxArraySize") or DEFAULT_ARRAY_SIZE)
    if size < 2:
        raise ClusterError(
            "This cluster does not allow job arrays (MaxArraySize is 0).",
            hint="Run the sweep on this machine with --local.",
        )
    match = re.search(r"max_array_tasks=(\d+)", config.get("SchedulerParameters", ""))
    return min(size, int(match[1])) if match else size


def max_new_jobs(wanted: int) -> int | None:
    """Return how many more jobs the controller can hold, or None if that is more than enough.

    sbatch would wait for room for minutes. It refuses at once what an association may not submit.
    """
    limit = int(_read_config().get("MaxJobCount") or 0)
    # It covers every user's jobs, and listing them all is slow: do it only when it may matter.
    if not limit or wanted * FRACTION <= limit:
        return None
    done = slurm.call(
        ["squeue", "--all", "--noheader", "--array", "--states=all", "--format=%i"], check=False
    )
    return max(1, limit - 1 - len(done.stdout.split()))


def _read_config() -> dict[str, str]:
    done = slurm.call(["scontrol", "show", "config"], check=False)
    return dict(re.findall(r"^(\w+)\s*=\s*(.*?)\s*$", done.stdout, re.MULTILINE))


def submit_array(
    plan: BatchJob,
    *,
    array: str,
    listing: str,
    after: Sequence[str] = (),
    known: Sequence[str] = (),
) -> str:
    """Submit the tasks in `listing` as one array and return its job id.

    `after` are jobs that must end first; `known` are the arrays that are submitted already.
    """
    extra = [f"--array={array}"]
    if after:
        extra.append(f"--dependency=afterany:{':'.join(after)}")
    *command, script = plan.sbatch
    folder = plan.folder.path
    with sbatch.withdrawn_on_failure(plan, folder / f"cancelled-{listing}", known=known):
        return sbatch.run_sbatch(
            [*command, *extra, script, listing], plan.submitter, folder=folder, known=known
        )
