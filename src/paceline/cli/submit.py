"""`paceline submit`: a script on Slurm."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import console, options
from paceline.cluster.checks.finding import PROBLEM, WARNING, Finding
from paceline.cluster.checks.job import check_job
from paceline.cluster.environment.store import settle
from paceline.cluster.runs import folder as folders
from paceline.cluster.runs.prepare import path_in_snapshot, prepare
from paceline.cluster.secrets.secrets import read_secrets
from paceline.cluster.slurm import commands as slurm
from paceline.cluster.slurm.limits import explain_refusal
from paceline.cluster.slurm.partitions import Partition, fair_cpus, find_partitions, select_partitions
from paceline.contract.run_folder import RunFolder, write_atomically
from paceline.contract.verdict import DONE, STOPPED, STOPPED_EXIT
from paceline.errors import ClusterError, UsageError
from paceline.plan.run_path import RunPath
from paceline.plan.slurm.array import Trials
from paceline.plan.slurm.plan import SlurmPlan, plan_slurm
from paceline.spec import Job, load_job


def option(name: str, text: str, *, metavar: str | None = None) -> typer.models.OptionInfo:
    found: typer.models.OptionInfo = typer.Option(name, help=text, metavar=metavar)
    return found


@options.takes_a_script
def command(
    words: options.Words = None,
    *,
    module: options.Module = False,
    nodes: Annotated[int | None, option("--nodes", "How many nodes.", metavar="N")] = None,
    gpus: Annotated[
        int | None, option("--gpus", "GPUs on each node; one rank runs per GPU.", metavar="N")
    ] = None,
    gpu_type: Annotated[str | None, option("--gpu-type", "Their model, as the cluster calls it.")] = None,
    cpus_per_gpu: Annotated[
        int | None, option("--cpus-per-gpu", "Cores per GPU (else a fair share).")
    ] = None,
    mem_per_gpu: Annotated[str | None, option("--mem-per-gpu", "Memory per GPU.", metavar="32G")] = None,
    mem_per_node: Annotated[str | None, option("--mem-per-node", "Memory per node.", metavar="256G")] = None,
    time: Annotated[str | None, option("--time", "The time limit.", metavar="2h")] = None,
    partition: Annotated[str | None, option("--partition", "The partition, or several with commas.")] = None,
    account: Annotated[str | None, option("--account", "The account that pays.")] = None,
    qos: Annotated[str | None, option("--qos", "The quality of service.")] = None,
    constraint: Annotated[str | None, option("--constraint", "Features that the nodes must have.")] = None,
    reservation: Annotated[str | None, option("--reservation", "The reservation to run in.")] = None,
    nodelist: Annotated[str | None, option("--nodelist", "Nodes that must be used.")] = None,
    exclude: Annotated[str | None, option("--exclude", "Nodes that must not be used.")] = None,
    after: Annotated[
        list[str] | None, option("--after", "Start when this run has ended well.", metavar="RUN")
    ] = None,
    exclusive: Annotated[bool, option("--exclusive", "Share the nodes with nobody.")] = False,
    comment: Annotated[str | None, option("--comment", "A comment for the accounting.")] = None,
    mail: Annotated[str | None, option("--mail", "Who is told when it ends.", metavar="ADDRESS")] = None,
    sbatch_arg: Annotated[
        list[str] | None,
        option("--sbatch-arg", "A further argument of sbatch (again for more).", metavar="ARG"),
    ] = None,
    style: options.Style = None,
    nproc: options.Nproc = None,
    cpu: options.Cpu = False,
    backend: options.Backend = None,
    env: options.Env = None,
    param: options.Param = None,
    experiment: options.Experiment = None,
    name: options.Name = None,
    precision: options.Precision = None,
    seed: options.Seed = None,
    max_steps: options.MaxSteps = None,
    profile: options.Profile = None,
    start_from: options.StartFrom = None,
    preload: options.Preload = None,
    tee: options.Tee = None,
    hang_timeout: options.HangTimeout = None,
    max_attempts: Annotated[
        int | None, option("--max-attempts", "Failures before the run is given up.", metavar="N")
    ] = None,
    grace: Annotated[
        str | None, option("--grace", "How long before the limit the ranks save and stop.", metavar="2m")
    ] = None,
    no_requeue: Annotated[bool, option("--no-requeue", "End at the time limit, for good.")] = False,
    data: options.Data = None,
    debug: options.Debug = False,
    wandb: options.Wandb = None,
    wandb_project: options.WandbProject = None,
    wandb_group: options.WandbGroup = None,
    wandb_all_processes: options.WandbAllProcesses = False,
    tensorboard: options.Tensorboard = False,
    config: options.Config = None,
    cluster_profile: options.ClusterProfile = None,
    no_snapshot: options.NoSnapshot = False,
    no_check: Annotated[bool, option("--no-check", "Do not look for problems first.")] = False,
    dry_run: options.DryRun = False,
    script_only: Annotated[
        Path | None,
        option("--script-only", "Prepare all, write the script to FILE, submit nothing.", metavar="FILE"),
    ] = None,
    wait: Annotated[bool, option("--wait", "Return when the run is over, with its status.")] = False,
    follow: Annotated[bool, option("--follow", "The same, and print what rank 0 prints.")] = False,
) -> int:
    """Start a script on Slurm.

    All options come before the script; all that follows it is the script's, untouched.

    \b
    paceline submit --nodes 2 --gpus 8 --time 4h train.py --lr 0.1
    paceline submit --gpus 1 --follow train.py         watch rank 0
    paceline submit --dry-run --gpus 8 train.py        print the exact script
    paceline submit --after last --gpus 8 evaluate.py  once the newest run is done

    The run goes back into the queue by itself when its time is up, and goes on from its newest checkpoint.
    """
    flags = options.flags_of(
        nodes=nodes, gpus=gpus, gpu_type=gpu_type, cpus_per_gpu=cpus_per_gpu, mem_per_gpu=mem_per_gpu,
        mem_per_node=mem_per_node, time=time, partition=partition, account=account, qos=qos,
        constraint=constraint, reservation=reservation, nodelist=nodelist, exclude=exclude,
        exclusive=exclusive, comment=comment, mail=mail, sbatch_arg=sbatch_arg, style=style, nproc=nproc,
        cpu=cpu, backend=backend, env=env, experiment=experiment, name=name, precision=precision, seed=seed,
        max_steps=max_steps, profile=profile, start_from=start_from, preload=preload, tee=tee,
        hang_timeout=hang_timeout, max_attempts=max_attempts, grace=grace, no_requeue=no_requeue, data=data,
        debug=debug, no_snapshot=no_snapshot, no_check=no_check,
    )  # fmt: skip
    flags += options.tracking_flags(
        wandb=wandb, project=wandb_project, group=wandb_group, all_processes=wandb_all_processes,
        tensorboard=tensorboard,
    )  # fmt: skip
    cwd = Path.cwd()
    program = options.find_program(words, is_module=module, cwd=cwd)
    job = load_job(program, flags=flags, params=param or (), config=config, profile=cluster_profile, cwd=cwd)
    draft = Draft(job, after=after or ())
    if dry_run:
        print(draft.plan(draft.run_path).show(), end="")
        return 0
    draft.check()
    folder, number = draft.submit(script_only=script_only)
    if number is None:
        return 0
    if follow or wait:
        return see_it_through(folder, follow=follow)
    return 0


class Draft:
    """A job on its way to the queue: what the cluster has, and the plan that follows from it."""

    def __init__(self, job: Job, *, after: Sequence[str] = (), trials: Trials | None = None) -> None:
        self.trials = trials  # of a sweep, where it is one
        self.job = job = settle(job, os.environ)
        self.run_path = folders.new_run_path(job, os.environ)
        self.secrets = read_secrets(job, os.environ)
        self.partitions: list[Partition] = find_partitions()
        self.after = [self._job_id(word) for word in after]

    def plan(self, run_path: RunPath) -> SlurmPlan:
        job = self.job
        gpus = job.resources.gpus_per_node or 0
        names = job.resources.partition or os.environ.get("SBATCH_PARTITION")
        fair = fair_cpus(
            select_partitions(self.partitions, names), gpus=gpus, gpu_type=job.resources.gpu_type,
            nproc=job.launch.nproc or 1,
        )  # fmt: skip

        def place_of(path: Path) -> Path:
            return path_in_snapshot(path, job=job, run_path=run_path) if job.project.snapshot else path

        return plan_slurm(
            job, run_path=run_path, environ=os.environ, python=sys.executable, fair_cpus=fair,
            after=self.after, filed=self.secrets, place_of=place_of, trials=self.trials,
        )  # fmt: skip

    def findings(self) -> list[Finding]:
        return check_job(self.job, self.plan(self.run_path), self.partitions)

    def check(self) -> None:
        """Say what is doubtful; refuse what cannot work."""
        if not slurm.available():
            raise ClusterError(
                "there is no sbatch here",
                hint="type this on a login node of the cluster, or make a small one here: paceline sandbox up",
            )
        if not self.job.launch.check:
            return
        found = self.findings()
        for each in found:
            if each.level == WARNING:
                console.say_note(f"{each.text}{f' ({each.hint})' if each.hint else ''}")
        problems = [each for each in found if each.level == PROBLEM]
        for each in problems[:-1]:
            console.say_problem(each.text, each.hint)
        if problems:
            raise UsageError(problems[-1].text, hint=problems[-1].hint or "or submit anyway: --no-check")

    def submit(self, *, script_only: Path | None = None) -> tuple[RunFolder, str | None]:
        """Make the run folder and give it to Slurm; a refusal leaves nothing behind."""
        job, number = self.job, None
        with folders.create_run_folder(self.run_path) as run_path:
            plan = self.plan(run_path)
            prepared = prepare(
                job,
                run_path=run_path,
                shape=plan.shape,
                launch_spec=plan.launch_spec,
                command=["paceline", *sys.argv[1:]],
                backend="slurm",
                snapshot_required=True,
                compiled=job.environment.kind == "current",
            )
            slurm.write_files(plan)
            if script_only is not None:
                write_atomically(script_only.absolute(), plan.script)
            else:
                number = self._give(plan)
        for note in (*plan.notes, *prepared.notes):
            console.say_note(note)
        self._tell(plan, number, script_only)
        return run_path.folder, number

    def _give(self, plan: SlurmPlan) -> str:
        try:
            return slurm.submit(plan)
        except ClusterError as refusal:
            words = refusal.message.partition("refused the job: ")[2]
            if not words:
                raise
            raise explain_refusal(self.job, plan, self.partitions, words) from None

    def _tell(self, plan: SlurmPlan, number: str | None, script_only: Path | None) -> None:
        run = plan.run_path.run_id
        if number is None:
            print(f"prepared {run}; submit it: sbatch {script_only}")
        else:
            print(f"submitted {run} as job {number}: {plan.layout.nodes} nodes x {plan.layout.nproc} ranks")
        print(f"  folder  {plan.run_path.folder.path}")
        if number is not None:
            print(f"  logs    paceline logs -f {run}")
            print("  state   paceline ps")
            print(f"  end it  paceline cancel {run}", flush=True)

    def _job_id(self, word: str) -> str:
        """`--after`: a run, or a job's id."""
        try:
            found = slurm.read_job_id(folders.find_run(word, self.run_path.scratch))
        except UsageError:
            if word.replace("_", "").isdigit():
                return word
            raise
        if found is None:
            raise UsageError(
                f"--after {word}: that run is no job of Slurm's", hint="runs here cannot be waited for"
            )
        return found


def see_it_through(folder: RunFolder, *, follow: bool) -> int:
    """Until the run is over; its status as an exit code."""
    from paceline.watch.logs import RunMonitor, wait_until_over
    from paceline.watch.logs import follow as stream

    if follow:
        monitor = RunMonitor(folder)
        for text in stream(folder, monitor=monitor):
            sys.stdout.write(text)
            sys.stdout.flush()
        record = monitor.record
    else:
        record = wait_until_over(folder)
    colour = console.GREEN if record.status == DONE else console.RED
    console.say(f"paceline: {record.run_id} (job {record.job}): {record.status}", colour=colour)
    if record.status == DONE:
        return 0
    console.say_note(f"logs: {folder.slurm_log}")
    return STOPPED_EXIT if record.status == STOPPED else 1
