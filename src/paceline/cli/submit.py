"""`paceline submit`: a script on Slurm."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import console, options
from paceline.cluster.checks.finding import Finding
from paceline.cluster.slurm.submission import Draft, Submitted
from paceline.contract.run_folder import RunFolder
from paceline.contract.verdict import DONE, STOPPED, STOPPED_EXIT
from paceline.spec import load_job


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
    warn(draft.check())
    submitted = draft.submit(["paceline", *sys.argv[1:]], script_only=script_only)
    describe(submitted, script_only)
    if submitted.job_id is not None and (follow or wait):
        return see_it_through(submitted.folder, follow=follow)
    return 0


def warn(findings: Sequence[Finding]) -> None:
    for finding in findings:
        console.say_note(f"{finding.text}{f' ({finding.hint})' if finding.hint else ''}")


def describe(submitted: Submitted, script_only: Path | None) -> None:
    """Print where the run is and what to type next."""
    for note in submitted.notes:
        console.say_note(note)
    plan, job_id = submitted.plan, submitted.job_id
    run = plan.run_path.run_id
    if job_id is None:
        print(f"prepared {run}; submit it: sbatch {script_only}")
    else:
        print(f"submitted {run} as job {job_id}: {plan.counts.nodes} nodes x {plan.counts.nproc} ranks")
    print(f"  folder  {submitted.folder.path}")
    if job_id is not None:
        print(f"  logs    paceline logs -f {run}")
        print("  state   paceline ps")
        print(f"  end it  paceline cancel {run}", flush=True)


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
