"""`paceline doctor`: find problems on this machine, of a job before it is queued, or of a run."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import console, typer_options
from paceline.contract.fitness import judge
from paceline.contract.launcher_variables import expand
from paceline.contract.run_folder import DONE, STOPPED, RunFolder
from paceline.contract.stacks import NodeAnswer
from paceline.errors import PacelineError
from paceline.launch import job_steps as probes
from paceline.launch.checks import check_disk, inspect_machine, inspect_site, inspect_slurm
from paceline.launch.resume import read_launch_spec
from paceline.launch.run_folder import find_run, resolve_scratch
from paceline.launch.secrets import inspect_secrets
from paceline.launch.slurm_job import SlurmJob
from paceline.spec.findings import GOOD, NOTE, PROBLEM, WARNING, Finding
from paceline.spec.job import Program
from paceline.spec.option import LAUNCH, PROJECT, RESOURCES
from paceline.spec.user_files import is_own_folder
from paceline.watch.diagnosis import diagnose
from paceline.watch.diagnosis.evidence import Evidence
from paceline.watch.diagnosis.pace import describe, find_slow_ranks
from paceline.watch.diagnosis.resources import compare_versions
from paceline.watch.records import Record, read_record

MARKS = {GOOD: ("✓", "good"), NOTE: ("·", "dim"), WARNING: ("!", "yellow"), PROBLEM: ("✗", "bad")}
INDENT = " " * 14


def names_a_run(name: str) -> bool:
    """Whether the first argument names a run: a script is a file."""
    return not name.endswith(".py") and not Path(name).is_file()


def is_about_run(args: Sequence[str] | None, *, is_job: bool, is_module: bool) -> bool:
    """Return whether the arguments name a run, rather than a script with its arguments."""
    return bool(args and len(args) == 1 and not is_job and not is_module and names_a_run(args[0]))


@typer_options.takes_settings(
    "doctor", script=True, shown=(RESOURCES, LAUNCH, PROJECT), names_a_run=names_a_run
)
def command(
    args: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN | SCRIPT [ARGS]...]", help="A run; or your script and its arguments."
        ),
    ] = None,
    *,
    settings: typer_options.Settings,
    is_job: Annotated[
        bool, typer.Option("--job", help="Check a job, as `paceline submit` does.")
    ] = False,
    module: typer_options.Module = False,
    as_json: typer_options.AsJson = False,
) -> int:
    """Find out why a run hangs, is slow or died; or check this machine, or a job before you submit it.

    For a run, it reads the run folder and, while the run is live, asks its nodes. Inside an allocation it compares and
    measures the nodes. Each finding has its evidence and what to do about it. All settings of `paceline submit` work
    for a job.

    \b
      paceline doctor last                       the newest run: missing ranks, slow parts, why it died
      paceline doctor --json 1a2b                the same as JSON
      paceline doctor                            this machine and its Slurm; the nodes of an allocation
      paceline doctor --job --gpus 4 train.py    a job: its script, imports, limits and start time
    """
    if args and is_about_run(args, is_job=is_job, is_module=module):
        job = settings.load(Program(""), here=True)
        folder = find_run(args[0], resolve_scratch(job, os.environ))
        return report(diagnose_run(folder), as_json=as_json)
    if is_job or args:
        cwd = Path.cwd()
        job = settings.load(settings.find_program(args, is_module=module, cwd=cwd), cwd=cwd)
        return report(SlurmJob(job).findings(), as_json=as_json)
    job = settings.load(Program(""))
    found = inspect_machine(os.environ, resolve_scratch(job, os.environ))
    if "SLURM_JOB_ID" in os.environ:
        found += inspect_allocation()
    found.append(inspect_secrets(job, os.environ))
    return report([*found, *inspect_site(), *inspect_slurm()], as_json=as_json)


def diagnose_run(folder: RunFolder) -> list[Finding]:
    record = read_record(folder)
    is_well = not record.is_over or record.status in (DONE, STOPPED)
    run = Finding("run", GOOD if is_well else NOTE, f"{record.folder.key} {record.status_phrase}")
    disks = [check_disk(folder.path)] if is_own_folder(folder.path) else []
    found = diagnose(Evidence(record, ask_nodes(record), disks))
    if all(each.level == GOOD for each in found):
        run = dataclasses.replace(run, text=f"{run.text}; nothing wrong was found")
    return [run, *found]


def ask_nodes(record: Record) -> list[NodeAnswer]:
    """Ask the nodes of a live run of this user's where its ranks are. If that fails, the run folder
    has to do.
    """
    if record.status != "running" or not is_own_folder(record.folder.path):
        return []
    nodes = record.state.nodes if record.state else ""
    stacks = bool(find_slow_ranks(Evidence(record)))
    try:
        spec = read_launch_spec(record.folder)
        return probes.ask_run(record.folder, spec, record.job, expand(nodes), stacks=stacks)
    except (OSError, ValueError, PacelineError) as error:
        return [NodeAnswer(nodes, problem=str(error).partition("\n")[0])]


def inspect_allocation() -> list[Finding]:
    """Compare and measure the nodes of the allocation around this command."""
    answers, problem = probes.ask_allocation(os.environ)
    if not answers:
        hint = "Check that `srun --overlap hostname` works in this allocation."
        return [Finding("nodes", WARNING, f"The nodes are not responding: {problem}.", hint)]
    nodes = {str(each.get("host", "?")): each for each in answers}
    listed = [
        f"{host}: {', '.join(name for name in node.get('interfaces') or () if name != 'lo')}"
        for host, node in sorted(nodes.items())
    ]
    measured, problem = probes.measure_allocation(os.environ)
    speed = describe(measured, judge(measured))
    if not measured:
        text = f"The nodes were not measured: {problem or 'no answer'}."
        speed = [Finding("fitness", WARNING, text, "The job's Python needs torch for this.")]
    return [Finding("nodes", GOOD, "; ".join(listed)), *compare_versions(nodes), *speed]


def report(findings: Sequence[Finding], *, as_json: bool = False) -> int:
    """Print a line per finding; below it the evidence, what to do, and where to read more. Return 1
    if one is a problem.
    """
    out = console.console()
    if as_json:
        console.print_json(findings=[dataclasses.asdict(each) for each in findings])
    for finding in findings if not as_json else ():
        mark, colour = MARKS[finding.level]
        out.print(f"[{colour}]{mark}[/] [dim]{console.cell(finding.about):<11}[/] ", end="")
        hint = f"Fix: {finding.hint}" if finding.evidence and finding.hint else finding.hint
        docs = f"More in the documentation: {finding.docs}" if finding.docs else ""
        parts = [finding.text, *(f"- {fact}" for fact in finding.evidence), hint, docs]
        lines = (line.strip() for part in parts for line in console.printable(part).splitlines())
        out.print(f"\n{INDENT}".join(filter(None, lines)), markup=False, soft_wrap=True)
    return int(any(each.level == PROBLEM for each in findings))
