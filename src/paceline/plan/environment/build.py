"""`build.sbatch`: bash that makes an environment, on a node or here, for itself or for others who wait for it.

A venv knows its own path, so it is built where it will be used. What makes it count is a file that is written last; a
builder that was killed leaves a folder without one, which the next builder removes. Builders of the same thing take
turns by a lock that can be taken over from a builder that is gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.plan.quote import quote
from paceline.plan.slurm.directives import Directive, file_pattern, render
from paceline.spec import Job
from paceline.spec.quantities import slurm_size, slurm_time

MARKER = "paceline-built.json"  # in the folder of an environment: written last
IMAGE = "image.sif"
SCRIPT_NAMES = {"build", "target", "lock", "me"}  # variables that the script has made its own
LOCK = ".lock"  # behind the folder's name
USUAL_TIME = 2 * 3600
USUAL_CPUS = 4

# What a build asks of the cluster comes from the same keys as a run, so that it lands on nodes like the run's.
_ASKED = ("partition", "account", "qos", "constraint", "reservation", "nodelist", "exclude")


@dataclass(frozen=True)
class BuildFolder:
    """`<store>/<key>.build-<id>`: what one build is given, and its log."""

    path: Path

    @property
    def script(self) -> Path:
        return self.path / "build.sbatch"

    @property
    def environment(self) -> Path:
        """The build's variables, 0600; removed when it ends."""
        return self.path / "environment.sh"

    @property
    def requirements(self) -> Path:
        return self.path / "requirements.txt"

    @property
    def constraints(self) -> Path:
        return self.path / "constraints.txt"

    @property
    def first(self) -> Path:
        """What is installed ahead of all else: torch, which others are compiled against."""
        return self.path / "first.txt"

    @property
    def definition(self) -> Path:
        return self.path / "image.def"

    @property
    def marker(self) -> Path:
        """The marker, until it is put in its place."""
        return self.path / "marker.json"

    @property
    def log(self) -> Path:
        return self.path / "log"

    @property
    def job(self) -> Path:
        """The scheduler's id of the job that builds; absent for a build here."""
        return self.path / "job"


@dataclass(frozen=True)
class Size:
    """What a build asks for. A run's own time and memory say nothing about that."""

    cpus: int = USUAL_CPUS
    gpus: int = 0
    memory: int | None = None  # MiB
    time: int = USUAL_TIME  # seconds


@dataclass(frozen=True)
class Build:
    """All that the script's text depends on."""

    title: str
    folder: BuildFolder
    target: Path  # what is built
    cwd: Path  # paths in requirements are taken from here
    directives: Sequence[Directive] = ()
    modules: Sequence[str] = ()  # lines of bash
    setup: Sequence[str] = ()
    steps: Sequence[str] = ()  # lines of bash that fill the target


def build_directives(job: Job, folder: BuildFolder, size: Size) -> list[Directive]:
    """One task on a node of the partition that the runs go to; GPUs only where they are asked for."""
    resources = job.resources
    found = [
        Directive("job-name", "env-build"),
        Directive("nodes", "1"),
        Directive("ntasks", "1"),
        Directive("cpus-per-task", str(size.cpus)),
    ]
    if size.gpus:
        kind = f"{resources.gpu_type}:" if resources.gpu_type else ""
        found.append(Directive("gres", f"gpu:{kind}{size.gpus}"))
    if size.memory is not None:
        found.append(Directive("mem", slurm_size(size.memory)))
    found.append(Directive("time", slurm_time(size.time)))
    for option in _ASKED:
        if (value := getattr(resources, option)) is not None:
            found.append(Directive(option, value))
    return [
        *found,
        Directive("chdir", str(folder.path)),
        Directive("output", file_pattern(str(folder.log))),
        Directive("open-mode", "append"),
        Directive("no-requeue"),
        Directive("export", "ALL"),
    ]


def render_build(build: Build) -> str:
    """The whole script."""
    head = [
        "#!/bin/bash",
        f"# {build.title}",
        "# Written by Paceline. Plain bash: sbatch build.sbatch builds on a node, bash build.sbatch here.",
        "#",
        *render(build.directives),
    ]
    sections = [head, _turns(build), _environment(build), list(build.steps), _end()]
    return "\n\n".join("\n".join(lines) for lines in sections) + "\n"


def _turns(build: Build) -> list[str]:
    return f"""\
build={quote(str(build.folder.path))} # what this build is given, and its log
target={quote(str(build.target))}
lock="$target{LOCK}"

say() {{ echo "paceline: $*"; }}
fail() {{
    echo "paceline: $*" >&2
    exit 1
}}

# It counts once the file that is written last is there.
is_built() {{ [ -e "$target/{MARKER}" ]; }}

# Who builds: a job, or a process of a host; and whether such a builder is still at it.
me="process-$HOSTNAME-$$"
[ -n "${{SLURM_JOB_ID:-}}" ] && me="job-$SLURM_JOB_ID"
readonly build target lock me # what goes when this fails is named by these: nothing below may change them
is_alive() {{
    case $1 in
        job-*)
            told=$(squeue --noheader --jobs="${{1#job-}}" --format=%T 2>&1)
            [ -n "$told" ] && [ "${{told#*Invalid job id}}" = "$told" ]
            ;;
        process-"$HOSTNAME"-*) kill -0 "${{1##*-}}" 2>/dev/null ;;
        *) true ;; # on another host: nobody can tell from here
    esac
}}

# One builder at a time. The lock is a folder with the builder's name in it, renamed into place whole; the name of a
# builder that is gone is renamed to one's own, which only one can do.
take_lock() {{
    mkdir -p "$build/lock" && : >"$build/lock/$me"
    [ -e "$build/lock/$me" ] || fail "cannot write to $build from $HOSTNAME: is it on a shared file system?"
    mv -T "$build/lock" "$lock" 2>/dev/null && return
    for other in "$lock"/*; do
        other=${{other##*/}}
        [ "$other" = "$me" ] && return
        if [ -e "$lock/$other" ] && ! is_alive "$other"; then
            mv "$lock/$other" "$lock/$me" 2>/dev/null && return
        fi
    done
    return 1
}}

# However this ends, and be it while it waits: what is not complete goes, and so do the lock and the variables.
clean_up() {{
    code=$?
    if [ -e "$lock/$me" ]; then
        is_built || rm -rf "$target"
        rm -f "$lock/$me"
        rmdir "$lock" 2>/dev/null
    fi
    rm -rf "$build/lock" "$build/environment.sh" "$build/tmp"
    exit "$code"
}}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

waiting=''
until is_built || take_lock; do
    if [ -z "$waiting" ] && [ -e "$lock/$other" ]; then
        waiting=1
        say "$other builds it already: waiting for that (if it is gone for good: rm -r $lock)"
    fi
    sleep 2
done
if is_built; then
    say "built already: $target"
    exit 0
fi
rm -rf "$target" # what a builder that was killed has left\
""".splitlines()


def _environment(build: Build) -> list[str]:
    lines = [
        "# The environment, with the modules of the runs.",
        "{ set +x; } 2>/dev/null",
        "# shellcheck disable=SC1091",
        'source "$build/environment.sh" || fail "cannot read $build/environment.sh"',
        *build.modules,
    ]
    if build.setup:
        lines += ["# Asked for by `setup` in paceline.toml:", *build.setup]
    return [*lines, f"cd {quote(str(build.cwd))} || fail {quote(f'cannot enter {build.cwd}')}"]


def _end() -> list[str]:
    return [
        "# Complete from here on.",
        f'cp "$build/marker.json" "$target/{MARKER}.partial" && mv "$target/{MARKER}.partial" "$target/{MARKER}"',
        'is_built || fail "cannot write to $target"',
        'say "built $target"',
    ]
