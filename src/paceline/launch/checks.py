"""Check a job before it is queued, so that mistakes do not cost a night in the queue."""

from __future__ import annotations

import difflib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from paceline.contract.env import ON_CLUSTER
from paceline.contract.run_folder import USED_BY_JOBS
from paceline.errors import ClusterError, NotConfigured, PacelineError
from paceline.launch.environment.activation import (
    FUNCTION,
    NO_ENGINE,
    ProbeResult,
    image_path,
    is_fetched,
    probe,
)
from paceline.launch.environment.store import check_built
from paceline.launch.launch_spec import data_settings, staging_request
from paceline.launch.local_run import detect_machine
from paceline.slurm import commands as slurm
from paceline.slurm.limits import check_limits, check_with_slurm
from paceline.slurm.partitions import Partition, query_partitions
from paceline.spec.findings import GOOD, PROBLEM, WARNING, Finding
from paceline.spec.job import Job, Program
from paceline.spec.run_path import RunPath
from paceline.spec.settings import SITE_FILE, find_site
from paceline.spec.shell_text import quote, to_type
from paceline.staging.request import check_sources

if TYPE_CHECKING:
    from paceline.launch.slurm_job import SlurmPlan


def check_data(job: Job, run_path: RunPath, environ: Mapping[str, str]) -> list[Finding]:
    """Check that every path to stage exists. Jobs that stage nothing get no finding."""
    if not data_settings(job):
        return []
    try:
        request = staging_request(job, scratch=run_path.scratch, environ=environ)
        check_sources(request)
    except PacelineError as error:
        return [Finding("data", PROBLEM, error.message, error.hint)]
    return [
        Finding(
            "data", GOOD, f"{len(request.items)} paths to stage, {len(request.collect)} to collect"
        )
    ]


LITTLE_SPACE, NO_SPACE = 2 * 2**30, 64 * 2**20
TEST_WRITE = 2**20  # bytes
MOUNTS = Path("/proc/mounts")
ELSEWHERE = "choose another folder with [project] scratch or PACELINE_SCRATCH."


def nearest_existing(path: Path) -> Path:
    """Return a path, or the nearest folder above it that this user can see."""
    return next(each for each in (path, *path.parents) if os.path.exists(each))


def file_system(path: Path, mounts: Path = MOUNTS) -> str:
    """Return the type of the file system that a path is on; empty if unknown."""
    best = kind_there = ""
    text = mounts.read_text(encoding="utf-8", errors="replace") if mounts.exists() else ""
    real = f"{path.resolve()}/"
    for line in text.splitlines():
        _, point, kind = (word.replace("\\040", " ") for word in line.split()[:3])
        if real.startswith(point.rstrip("/") + "/") and len(point) >= len(best):
            best, kind_there = point, kind
    return kind_there


def check_disk(folder: Path) -> Finding:
    """Check with a test write that a folder, or the one that it will be created in, takes files."""
    existing = nearest_existing(folder)
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(os.urandom(TEST_WRITE))
            file.flush()
            os.fsync(file.fileno())  # a quota may be noticed only now
    except OSError as error:
        text = f"You cannot write to the scratch folder {folder}: {error.strerror}."
        return Finding("disk", PROBLEM, text, f"Make room there, or {ELSEWHERE}")
    free = shutil.disk_usage(existing).free
    text = f"{free / 2**30:.1f} GB free"
    if free >= LITTLE_SPACE:
        return Finding("disk", GOOD, text)
    level = PROBLEM if free < NO_SPACE else WARNING
    text = f"The scratch folder {folder} has little space left: {text}."
    return Finding("disk", level, text, f"Remove old runs (paceline clean), or {ELSEWHERE}")


def check_job(job: Job, plan: SlurmPlan, partitions: Sequence[Partition]) -> list[Finding]:
    """Run every check, the quick and certain ones first. Slurm checks the real script last."""
    built = check_built(job)
    if any(each.level == PROBLEM for each in built):
        return built
    found = [
        *built,
        *check_program(job, plan),
        *check_folder(plan, partitions),
        *check_data(job, plan.run_path, os.environ),
        *check_limits(job, plan, partitions),
    ]
    if any(each.level == PROBLEM for each in found):
        return found
    return [*found, check_with_slurm(job, plan, partitions)]


_LOCAL = ("tmpfs", "ramfs", "overlay", "ext2", "ext3", "ext4", "xfs", "btrfs", "zfs")


def check_folder(plan: SlurmPlan, partitions: Sequence[Partition]) -> list[Finding]:
    """Check that the run folder can be written, and that all nodes are likely to see it.

    A scratch folder that a job has written to needs no warning, whatever disk it is on; nor does
    one of the sandbox, whose nodes are on this machine.
    """
    scratch = plan.run_path.scratch
    disk = check_disk(scratch)
    if disk.level == PROBLEM:
        return [disk]
    kind = file_system(nearest_existing(scratch))
    is_proven = os.path.exists(scratch / USED_BY_JOBS) or _is_sandbox()
    if kind in _LOCAL and partitions and not is_proven:
        host = socket.gethostname().split(".")[0]
        text = f"{scratch} is on a local disk of {host} ({kind}), which the nodes may not see."
        hint = "Choose a shared folder with [project] scratch or PACELINE_SCRATCH."
        return [Finding("run folder", WARNING, text, hint), disk]
    text = f"{scratch} ({kind or 'file system unknown'})"
    return [Finding("run folder", GOOD, text), disk]


def _is_sandbox() -> bool:
    conf = Path(os.environ.get("SLURM_CONF", os.devnull))
    return os.access(conf, os.R_OK) and "ClusterName=sandbox\n" in conf.read_text(
        "utf-8", "replace"
    )


# Variables in which clusters name their large, fast, shared folders.
SCRATCH_VARIABLES = (
    "SCRATCH",
    "PSCRATCH",
    "WORK",
    "SCRATCH_DIR",
    "GSCRATCH",
    "CSCRATCH",
    "WRKDIR",
    "SCRATCHDIR",
)


def inspect_machine(environ: Mapping[str, str], scratch: Path) -> list[Finding]:
    """Check everything but the scheduler."""
    machine = detect_machine(environ)
    found = [
        Finding("python", GOOD, f"{platform.python_version()} ({sys.executable})"),
        _torch(),
        Finding("machine", GOOD, f"{machine.cores} cores, {machine.gpus} GPUs, {machine.system}"),
        Finding("scratch", GOOD, str(scratch)),
        check_disk(scratch),
    ]
    if "SLURM_JOB_ID" in environ:
        nodes = environ.get("SLURM_JOB_NODELIST", "?")
        found.append(
            Finding("allocation", GOOD, f"inside job {environ['SLURM_JOB_ID']} on {nodes}")
        )
    return found


def _torch() -> Finding:
    try:
        return Finding("torch", GOOD, importlib.metadata.version("torch"))
    except importlib.metadata.PackageNotFoundError:
        return Finding(
            "torch",
            WARNING,
            "This Python has no torch.",
            "Fine on a login node if jobs use another environment. Otherwise: pip install torch",
        )


def inspect_site() -> list[Finding]:
    """Say what the site sets; nothing if it has no file."""
    tables = find_site().model_dump(mode="json", exclude_none=True).values()
    set_keys = [f"{key} {value}" for table in tables for key, value in table.items()]
    return [Finding("site", GOOD, f"{', '.join(set_keys)} ({SITE_FILE})")] if set_keys else []


def inspect_slurm() -> list[Finding]:
    """Check the scheduler, as far as it responds."""
    if not slurm.available():
        return [
            Finding(
                "slurm",
                WARNING,
                "There is no sbatch here.",
                "Use `paceline run`, or start a cluster here: paceline sandbox up",
            )
        ]
    try:
        partitions = query_partitions()
    # its packages are here, as on a laptop that only has the commands
    except NotConfigured as error:
        return [Finding("slurm", WARNING, error.message, error.hint)]
    except ClusterError as error:
        reason = f"Slurm does not respond: {error.message}"
        return [Finding("slurm", PROBLEM, reason, error.hint)]
    found = [Finding("slurm", GOOD, f"{slurm.version()}, {len(partitions)} partitions")]
    return found + [
        Finding(f"  {each.name}", GOOD if each.is_up else WARNING, describe(each))
        for each in partitions
    ]


def describe(partition: Partition) -> str:
    """Describe a partition in one line."""
    from paceline.spec.quantities import show_seconds

    gpus = ", ".join(f"{count} x {name or 'gpu'}" for name, count in partition.gpu_types.items())
    limit = show_seconds(partition.max_time) if partition.max_time else "no limit"
    cpus = max((kind.cpus for kind in partition.kinds), default=0)
    usable = sum(kind.count for kind in partition.kinds if kind.usable)
    parts = [
        f"{usable} of {partition.nodes} nodes usable",
        f"{cpus} cores",
        gpus or "no GPUs",
        limit,
    ]
    return ", ".join([*parts, *(["the default"] if partition.is_default else [])])


# Runs on the job's own interpreter. Imports that a script guards (in a try, a function, an if) are
# not checked.
_PROBE = """
import ast, importlib.util, json, os, sys, tokenize
name, is_module, cwd = sys.argv[1], sys.argv[2] == "module", sys.argv[3]
sys.path[0] = cwd if is_module else os.path.dirname(name)
answer = {"version": sys.version.split()[0]}
def spec(name):
    try:
        return importlib.util.find_spec(name)
    except Exception:
        return None
if is_module:
    found = spec(name) or spec(name + ".__main__")
    path = found.origin if found else None
    answer["missing_module"] = found is None
else:
    path = name
if path and path.endswith(".py"):
    try:
        with tokenize.open(path) as file:
            tree = ast.parse(file.read(), path)
    except (SyntaxError, UnicodeDecodeError, ValueError) as error:
        line = getattr(error, "lineno", 0)
        text = getattr(error, "text", "") or ""
        answer["syntax"] = [line, getattr(error, "msg", str(error)), text.strip()]
    else:
        imports = []
        for node in tree.body:
            if isinstance(node, ast.Import):
                imports += [alias.name.split(".")[0] for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                imports.append(node.module.split(".")[0])
        known = {"paceline", *sys.modules}
        imports += ["torch"] if "paceline" in imports else []
        unknown = {each for each in imports if each not in known}
        answer["missing"] = sorted(each for each in unknown if spec(each) is None)
        named = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
        paths = [node for node in named if node.attr == "path"]
        answer["own_path"] = any(getattr(node.value, "id", "") == "sys" for node in paths)
print(json.dumps(answer))
"""

_FIX = {
    "venv": "Correct the path, ask its owner for access, or build a venv: paceline env build",
    "conda": "Correct the path; `conda env list` shows the folders.",
}


def check_program(job: Job, plan: SlurmPlan) -> list[Finding]:
    """Check that the interpreter runs, the script compiles, and its imports are there."""
    python, name = plan.launch_spec.python, job.program.name
    found = []
    if job.environment.kind == "container":
        found.append(check_image(job))
        # pyxis is part of srun: its images cannot be entered here
        is_here = job.environment.engine != "pyxis" and not is_fetched(job)
        if found[0].level == PROBLEM or not is_here:
            return found
    answer = _probe(job, plan)
    if isinstance(answer, Finding):
        return [*found, answer]
    if job.environment.modules:
        found.append(Finding("modules", GOOD, " ".join(job.environment.modules)))
    found.append(Finding("python", GOOD, f"{python} ({answer['version']})"))
    if answer.get("missing_module"):
        text = f"{python} does not find the module {name!r}."
        return [*found, Finding("module", PROBLEM, text, _install())]
    if "syntax" in answer:
        line, message, text = answer["syntax"]
        problem = f"{name} does not compile: line {line}: {message}."
        return [*found, Finding("script", PROBLEM, problem, f"line {line}: {text}")]
    found.append(Finding("script", GOOD, f"{name} compiles"))
    return [*found, _imports(job, python, answer)]


def _imports(job: Job, python: str, answer: dict[str, Any]) -> Finding:
    missing = answer.get("missing")
    if not missing:
        return Finding("imports", GOOD, "all found")
    text = f"{job.program.name} imports {', '.join(missing)}, which {python} does not have."
    if answer["own_path"]:  # only the script knows what it adds
        hint = "The script changes sys.path; check that it finds them there."
        return Finding("imports", WARNING, text, hint)
    hint = _install()
    if (module := _as_module(job.program)) and all(_is_here(each, job.cwd) for each in missing):
        hint = f"Use -m {module}, so that it finds what is in {job.cwd}."
    return Finding("imports", PROBLEM, text, hint)


def _as_module(program: Program) -> str:
    """Return the name with which `-m` starts a script in a folder below; empty for any other.

    A script finds what is beside it, and a module what is in the current folder.
    """
    path = PurePath(program.name)
    parts = path.with_suffix("").parts
    is_below = not program.is_module and len(parts) > 1 and path.suffix == ".py"
    return ".".join(parts) if is_below and all(part.isidentifier() for part in parts) else ""


def _is_here(package: str, folder: Path) -> bool:
    return (folder / package).is_dir() or (folder / f"{package}.py").is_file()


def _install() -> str:
    cluster = os.environ.get(ON_CLUSTER)
    table = f"profiles.{cluster}.environment" if cluster else "environment"
    build = f"build an environment with `{to_type('env build')}`"
    return f"Install it there, {build}, or set kind and path in [{table}]."


def _probe(job: Job, plan: SlurmPlan) -> dict[str, Any] | Finding:
    program = job.program
    name = program.name if program.is_module else str(job.cwd / program.name)
    kind = "module" if program.is_module else "script"
    result = probe_python(plan, ["-c", _PROBE, name, kind, str(job.cwd)])
    try:
        # The last line: modules and lines of `setup` may print too.
        answer: dict[str, Any] = json.loads(result.out.strip().splitlines()[-1])
        return answer
    except (ValueError, IndexError):
        return _explain(job, plan, result)


def _explain(job: Job, plan: SlurmPlan, result: ProbeResult) -> Finding:
    """Return why the job's Python could not be run, or printed nothing."""
    python, environment = plan.launch_spec.python, job.environment
    if result.failure is not None:
        about, hint = "python", _FIX["venv"]
        if module := re.fullmatch(r"Cannot load the module (.*)\.", result.failure):
            about, hint = "modules", module_hint(plan, module[1])
        elif "'module' command" in result.failure:
            about = "modules"
            hint = "Remove modules from [environment], or submit where there is a module system."
        key = "modules" if about == "modules" else "path"
        return Finding(about, PROBLEM, _with_source(job, key, result.failure), hint)
    if result.code == NO_ENGINE and environment.kind == "container":
        text = "There is neither apptainer nor singularity here, so the image is not checked."
        hint = "If a module provides it, add that to modules in [environment]."
        return Finding("container", WARNING, text, hint)
    reason = "it took too long" if result.code is None else result.last_line
    if result.code in (126, 127) and environment.kind != "container":
        key = "python" if environment.python else "path" if environment.path else "kind"
        text = f"{python} cannot be run here: {reason.rpartition(': ')[2]}."
        hint = _FIX.get(environment.kind, "Correct the path.")
        return Finding("python", PROBLEM, _with_source(job, key, text), hint)
    where = f" in {image_path(job)}" if environment.kind == "container" else ""
    after = f" after the lines of {job.source('environment.setup')}" if environment.setup else ""
    hint = "The script's imports are not checked."
    return Finding("setup", WARNING, f"{python}{where} gave no answer{after}: {reason}", hint)


def _with_source(job: Job, key: str, text: str) -> str:
    return f"{text.removesuffix('.')} ({job.source(f'environment.{key}')})."


def check_image(job: Job) -> Finding:
    image = image_path(job)
    if is_fetched(job):
        if job.environment.engine == "pyxis":
            return Finding("image", GOOD, f"{image} (fetched by pyxis)")
        text = f"Every node fetches {image} when the job starts: can they reach it?"
        return Finding("image", WARNING, text, "Fetch it once: paceline env build")
    if not os.access(image, os.R_OK):
        text = f"There is no image {image} that you can read."
        return Finding("image", PROBLEM, text, f"Check {job.source('environment.image')}.")
    return Finding("image", GOOD, image)


# -- running something in its environment


def environment_lines(plan: SlurmPlan) -> list[str]:
    """Return the lines of a script that set up its environment, with the variables themselves."""
    return [
        f"paceline_run={quote(str(plan.run_path.folder.path))}",
        f"paceline_python={quote(plan.launch_spec.python)}",
        plan.environment_file,
        *plan.environment.after_variables(),
    ]


def probe_python(plan: SlurmPlan, args: Sequence[str]) -> ProbeResult:
    """Run the job's own Python: in its container, if it has one that bash can enter."""
    start = FUNCTION if plan.environment.container else "exec"
    return probe(
        environment_lines(plan), f'{start} "$paceline_python" "$@"', *args, environ=plan.submitter
    )


def module_hint(plan: SlurmPlan, name: str) -> str:
    """Return what to write instead of a module that cannot be loaded."""
    # What is available depends on what was loaded before.
    lines = [plan.environment_file, *plan.environment.modules.until(name).lines()]
    known = available_names(probe(lines, "module -t avail 2>&1", environ=plan.submitter).out)
    if name in known:
        return f"It exists but cannot be loaded. Try it in a shell: module load {name}"
    close = difflib.get_close_matches(name, known, n=6, cutoff=0.5)
    if close:
        return f"Available versions: {', '.join(sorted(close))}."
    return (
        "`module avail` lists all modules; module_paths in [environment] adds folders of modules."
    )


def available_names(text: str) -> list[str]:
    """Return the names that `module -t avail` lists, without headings (which end in a colon) and
    marks (which follow names in brackets).
    """
    names = (re.sub(r"\s*[(<].*$", "", line.strip()) for line in text.splitlines())
    return [name for name in names if re.fullmatch(r"[^\s]*[^\s:/]", name)]
