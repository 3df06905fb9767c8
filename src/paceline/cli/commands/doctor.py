"""`paceline doctor`: find problems on this machine, of a job before it is queued, or of a run."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import console, typer_options
from paceline.cli.console import print_json
from paceline.errors import PacelineError
from paceline.launch.run_folder import find_run, resolve_scratch
from paceline.spec.findings import GOOD, NOTE, PROBLEM, WARNING, Finding, worst
from paceline.spec.job import Program
from paceline.spec.option import LAUNCH, PROJECT, RESOURCES

if TYPE_CHECKING:
    from paceline.contract.fitness import Measurement
    from paceline.contract.launch_spec import LaunchSpec
    from paceline.contract.run_folder import RunFolder
    from paceline.contract.stacks import NodeAnswer
    from paceline.watch.records import Record

MARKS = {GOOD: ("✓", "good"), NOTE: ("·", "dim"), WARNING: ("!", "yellow"), PROBLEM: ("✗", "bad")}
INDENT = " " * 14
OTHER_NODES = "For other nodes: run `paceline doctor` inside an allocation (paceline shell), or submit with --fitness."


def names_a_run(name: str) -> bool:
    """Whether the first argument names a run: a script is a file."""
    return not name.endswith(".py") and not Path(name).is_file()


def is_about_run(args: Sequence[str] | None, *, is_job: bool, is_module: bool) -> bool:
    """Return whether the arguments name a run, rather than a script with its arguments."""
    return (
        args is not None
        and len(args) == 1
        and not is_job
        and not is_module
        and names_a_run(args[0])
    )


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
      paceline doctor --fitness 1a2b             also measure the GPUs, cores and links of its nodes
      paceline doctor                            this machine and its Slurm; the nodes of an allocation
      paceline doctor --job --gpus 4 train.py    a job: its script, imports, limits and start time
    """
    if args and is_about_run(args, is_job=is_job, is_module=module):
        job = settings.load(Program(""), here=True)
        folder = find_run(args[0], resolve_scratch(job, os.environ))
        return report(diagnose_run(folder, fitness=job.launch.fitness), as_json=as_json)
    if is_job or args:
        from paceline.launch.slurm_job import SlurmJob

        cwd = Path.cwd()
        job = settings.load(settings.find_program(args, is_module=module, cwd=cwd), cwd=cwd)
        return report(SlurmJob(job).findings(), as_json=as_json)
    from paceline.launch.checks.machine import inspect_machine, inspect_site, inspect_slurm
    from paceline.launch.secrets import inspect_secrets

    job = settings.load(Program(""))
    machine = inspect_machine(os.environ, resolve_scratch(job, os.environ))
    allocation = inspect_allocation() if "SLURM_JOB_ID" in os.environ else []
    if not allocation and any(flag.key == "launch.fitness" for flag in settings.flags):
        hint = f"Pass a run that is running on Slurm: paceline doctor --fitness RUN. {OTHER_NODES}"
        allocation = [
            Finding("fitness", WARNING, "--fitness measured nothing: you passed no run.", hint)
        ]
    return report(
        [
            *machine,
            *allocation,
            inspect_secrets(job, os.environ),
            *inspect_site(os.environ),
            *inspect_slurm(),
        ],
        as_json=as_json,
    )


def diagnose_run(folder: RunFolder, *, fitness: bool = False) -> list[Finding]:
    from paceline.contract.verdict import DONE, STOPPED
    from paceline.launch.checks.quota import check_quota
    from paceline.watch.diagnosis.diagnosis import diagnose
    from paceline.watch.diagnosis.evidence import read_evidence
    from paceline.watch.diagnosis.pace import find_slow_ranks
    from paceline.watch.records import read_record

    record = read_record(folder)
    is_well = not record.is_over or record.status in (DONE, STOPPED)
    run = Finding("run", GOOD if is_well else NOTE, f"{record.folder.key} {record.status_phrase}")
    stacks = record.status == "running" and bool(find_slow_ranks(read_evidence(record)))
    answers = ask_nodes(record, stacks=stacks)
    found = diagnose(read_evidence(record, answers, check_quota(folder.path)))
    if fitness:
        found = [*(each for each in found if each.about != "fitness"), *measure_nodes(record)]
        found.sort(key=lambda each: [PROBLEM, WARNING, NOTE, GOOD].index(each.level))
    if all(each.level == GOOD for each in found):
        run = dataclasses.replace(run, text=f"{run.text}; nothing wrong was found")
    return [run, *found]


def ask_nodes(record: Record, *, stacks: bool) -> list[NodeAnswer]:
    """Ask the nodes of a live run of this user's where its ranks are. If that fails, the run folder
    has to do.
    """
    from paceline.contract.hostlist import expand
    from paceline.contract.stacks import NodeAnswer
    from paceline.launch.probes import ask_run
    from paceline.spec.file_owner import is_own_folder

    if record.status != "running" or not is_own_folder(record.folder.path):
        return []
    nodes = record.state.nodes if record.state else ""
    try:
        spec = read_launch_spec(record.folder)
        return ask_run(record.folder, spec, record.job, expand(nodes), stacks=stacks)
    except (OSError, ValueError, PacelineError) as error:
        return [NodeAnswer(nodes, problem=str(error).partition("\n")[0])]


def measure_nodes(record: Record) -> list[Finding]:
    """Measure the GPUs, cores and links of a live run's nodes."""
    from paceline.launch.probes import measure_run
    from paceline.spec.file_owner import is_own_folder

    if record.status == "running" and record.job is None:
        text = (
            "This run was not started by Slurm. Its machine can be measured only before it starts."
        )
        hint = "Start it with the check: paceline run --fitness."
        return [Finding("fitness", WARNING, text, hint)]
    if record.status != "running" or record.job is None or not is_own_folder(record.folder.path):
        text = "Paceline can measure only the nodes of your own running jobs."
        return [Finding("fitness", WARNING, text, OTHER_NODES)]
    spec = read_launch_spec(record.folder)
    return describe_speed(*measure_run(record.folder, spec, job=record.job))


def read_launch_spec(folder: RunFolder) -> LaunchSpec:
    from paceline.contract.launch_spec import LaunchSpec

    return LaunchSpec.from_json(folder.launch_spec.read_text(encoding="utf-8"))


def inspect_allocation() -> list[Finding]:
    """Compare and measure the nodes of the allocation around this command."""
    from paceline.launch.probes import ask_allocation, measure_allocation
    from paceline.watch.diagnosis.resources import compare_versions

    answers, problem = ask_allocation(os.environ)
    if not answers:
        hint = "Check that `srun --overlap hostname` works in this allocation."
        return [Finding("nodes", WARNING, f"The nodes are not responding: {problem}.", hint)]
    nodes = {str(each.get("host", "?")): each for each in answers}
    listed = []
    for host, node in sorted(nodes.items()):
        known = (node.get("interfaces") or {}).items()
        own = ", ".join(f"{name} {address}" for name, address in known if name != "lo")
        listed.append(f"{host}: {own}")
    return [
        Finding("nodes", GOOD, "; ".join(listed)),
        *compare_versions(nodes),
        *describe_speed(*measure_allocation(os.environ)),
    ]


def describe_speed(measured: Sequence[Measurement], problem: str) -> list[Finding]:
    from paceline.contract.fitness import judge
    from paceline.watch.diagnosis.pace import describe

    if measured:
        return describe(measured, judge(measured))
    text = f"The nodes could not be measured: {problem or 'no answer'}."
    return [Finding("fitness", WARNING, text, "The job's Python needs torch for this.")]


def report(findings: Sequence[Finding], *, as_json: bool = False) -> int:
    """Print the findings; return 1 if one is a problem."""
    if as_json:
        print_json(findings=[dataclasses.asdict(each) for each in findings])
    else:
        draw(findings)
    return 1 if worst(findings) == PROBLEM else 0


def draw(findings: Sequence[Finding]) -> None:
    """Print a line per finding; below it the evidence, what to do, and where to read more."""
    out = console.console()
    for finding in findings:
        mark, colour = MARKS[finding.level]
        out.print(f"[{colour}]{mark}[/] [dim]{console.cell(finding.about):<11}[/] ", end="")
        hint = f"Fix: {finding.hint}" if finding.evidence and finding.hint else finding.hint
        below = [f"- {_indented(fact, '  ')}" for fact in finding.evidence]
        below += [_indented(hint)] if hint else []
        below += [where_to_read(finding.docs)] if finding.docs else []
        text = "\n".join([_indented(finding.text), *(f"{INDENT}{each}" for each in below)])
        out.print(text, markup=False, soft_wrap=True)


def where_to_read(docs: str) -> str:
    """Return the page and the section of the documentation as words: an installed Paceline has no
    files of it.
    """
    page, _, section = docs.partition("#")
    title = page.rpartition("/")[2].removesuffix(".md").replace("-", " ").capitalize()
    heading = section.replace("nccls", "NCCL's").replace("gpus", "GPUs").replace("-", " ")
    return f'More in the documentation: {title}, "{heading[:1].upper()}{heading[1:]}"'


def _indented(text: str, more: str = "") -> str:
    """Return a text whose further lines begin below its first one."""
    first, *rest = console.printable(text).splitlines() or [""]
    return "\n".join([first, *(f"{INDENT}{more}{line.strip()}" for line in rest)])
