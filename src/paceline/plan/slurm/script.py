"""`job.sbatch`: short, commented bash that a person can read, keep, and submit by hand.

It is bash and Slurm only, since a host may keep every Python in a container, and it does not grow with the number
of nodes. All that happens on the nodes happens in the agents, inside one live step: after a cancel, a
preemption or the time limit Slurm refuses every new one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.contract.run_folder import RunFolder
from paceline.plan.environment.container import Wrapping
from paceline.plan.quote import quote
from paceline.plan.slurm.directives import Directive, Layout, render

UNFIT_REQUEUES = 3  # how often a run goes back into the queue to get rid of unfit nodes
LINE = 110
RUN = "$run"
PER_RUN = 'PACELINE_RUN="$run" '


@dataclass(frozen=True)
class Batch:
    """All that the script's text depends on."""

    title: str  # one line: what runs, on how much
    folder: RunFolder
    python: str
    layout: Layout
    directives: Sequence[Directive]
    wrapping: Wrapping
    modules: Sequence[str] = ()  # lines of bash
    activation: Sequence[str] = ()
    setup: Sequence[str] = ()  # the user's own lines
    mpirun: bool = False
    forwarded: Sequence[str] = ()  # names that mpirun carries to the nodes
    requeue: bool = True
    nodelist: bool = False  # the user chose the nodes: none can be left out
    exclude: str = ""  # nodes that the user leaves out
    step_options: Sequence[str] = field(default_factory=tuple)  # further options of srun, as plain words
    step_words: Sequence[str] = ()  # and as bash: not quoted
    home: str = RUN  # where environment.sh and the run half lie
    salt: str = ""  # what tells the ports of one job's agents apart, as bash counts


AGAIN = (
    "Written by Paceline. Plain bash and Slurm: it may be read, kept, and submitted again: sbatch job.sbatch"
)


def render_batch(batch: Batch) -> str:
    """The whole script."""
    sections = [
        head_lines(
            batch,
            "Written by Paceline. Plain bash and Slurm: it may be read, kept, and submitted again: sbatch job.sbatch",
        ),
        _identity(batch),
        environment_lines(batch),
        meeting_lines(batch),
        launch_lines(batch),
        _verdict(batch),
    ]
    return joined(sections)


def joined(sections: Sequence[Sequence[str]]) -> str:
    return "\n\n".join("\n".join(lines) for lines in sections) + "\n"


def head_lines(batch: Batch, *words: str) -> list[str]:
    """`words` say what to do with the script."""
    return [
        "#!/bin/bash",
        f"# {batch.title}",
        *(f"# {line}" for line in words),
        "#",
        *render(batch.directives),
    ]


def _identity(batch: Batch) -> list[str]:
    return f"""\
run={quote(str(batch.folder.path))} # everything about this run is in this folder
python={quote(batch.python)}

fail() {{
    echo "paceline: $*" >&2
    exit 1
}}

# This job's own name (a task of an array is ARRAY_TASK: its plain id may mean the whole array), and the name of
# this start of it: a job that goes back into the queue keeps its id.
self=${{SLURM_ARRAY_JOB_ID:+${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID}}
self=${{self:-$SLURM_JOB_ID}}
job_start="$self-${{SLURM_RESTART_COUNT:-0}}"

# Newer versions of Slurm send a preempted job back into the queue even when it has come to its end meanwhile.
if [ "$(cat "$run/job-starts/$self-$((${{SLURM_RESTART_COUNT:-0}} - 1))/verdict" 2>/dev/null)" = "done" ]; then
    echo "paceline: job $self: done before"
    exit 0
fi
{fixed_lines(batch)}# What somebody cancelled stays cancelled.
[ -e "$run/cancelled" ] && fail "this run was cancelled; remove $run/cancelled to let it go on"
mkdir -p "$run/job-starts/$job_start" || fail "cannot write to $run from $HOSTNAME: is it on a shared file system?"

# Two jobs must not train in one folder. Of two that start at once, the last to write its name here goes on.
other=$(cat "$run/job" 2>/dev/null)
echo "$self" >"$run/job-starts/$job_start/job" && mv -f "$run/job-starts/$job_start/job" "$run/job"
if [ -n "$other" ] && [ "$other" != "$self" ]; then
    case $(squeue --noheader --jobs="$other" --format=%T 2>/dev/null) in
        RUNNING | SUSPENDED | STOPPED)
            echo "$other" >"$run/job"
            fail "this run is live already, as job $other"
            ;;
    esac
fi
other=$(cat "$run/job")
[ "$other" = "$self" ] || fail "this run is live already, as job $other"

# Before the time limit Slurm sends USR1 to this shell: the head agent sees the file `stop`, the ranks save
# and stop. TERM means that somebody wants the job gone.
ended='' hit='' pid=''
trap 'hit=1; : >"$run/job-starts/$job_start/stop"' USR1
trap 'hit=1; ended=1{pass_on(batch)}' TERM\
""".splitlines()


def fixed_lines(batch: Batch) -> str:
    if not batch.requeue:
        return ""
    return """\
# Some clusters do not let jobs be requeued, whatever was asked.
fixed=$(scontrol show job "$SLURM_JOB_ID" 2>/dev/null | grep -o 'Requeue=0')

"""


def pass_on(batch: Batch) -> str:
    """mpirun's processes on the first host belong to the batch step, where Slurm's own TERM does not reach them."""
    return '; [ -z "$pid" ] || kill -TERM "$pid"' if batch.mpirun else ""


def environment_lines(batch: Batch) -> list[str]:
    lines = [
        "# The environment. The variables' values stand in a file that only their owner can read, and nowhere else.",
        "{ set +x; } 2>/dev/null",
        "# shellcheck disable=SC1091",
        f'source "{batch.home}/environment.sh" || fail "cannot read {batch.home}/environment.sh"',
        *batch.modules,
        *batch.activation,
    ]
    if batch.setup:
        lines += ["# Asked for by `setup` in paceline.toml:", *batch.setup]
    return [
        *lines,
        *batch.wrapping.definition,
        "# The part of Paceline that runs inside jobs travels with the run: the job's Python needs torch alone.",
        f'export PYTHONPATH="{batch.home}/paceline.zip${{PYTHONPATH:+:$PYTHONPATH}}"',
        f'export {PER_RUN if batch.home == RUN else ""}PACELINE_JOB_START="$job_start"',
    ]


def meeting_lines(batch: Batch) -> list[str]:
    if batch.layout.tasks == 1:
        return ["# One agent alone: it has nobody to meet."]
    count = f"SLURM_JOB_ID * 31 + ${{SLURM_RESTART_COUNT:-0}} * 7{batch.salt}"
    return f"""\
# Where the agents meet: this host, and a port where nobody answers. Each job and each start tries another
# one first. The token keeps strangers out.
port=$((20000 + ({count}) % 12000))
while (: >"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do port=$((port + 1)); done
PACELINE_TOKEN=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n')
export PACELINE_TOKEN PACELINE_RENDEZVOUS="$HOSTNAME:$port\"""".splitlines()


def launch_lines(batch: Batch) -> list[str]:
    command = _mpirun(batch) if batch.mpirun else _srun(batch)
    return [
        *_forwarding(batch),
        *batch.wrapping.hand_out,
        "# One agent per rank."
        if batch.layout.tasks_per_node > 1
        else "# One agent per node starts the ranks.",
        *(['[ -z "$ended" ] || fail "ended before it began"'] if batch.home == RUN else []),
        *_folded(command),
        "pid=$!",
        "while :; do # a trap interrupts `wait`: wait again",
        "    hit=",
        '    wait "$pid"',
        '    [ -n "$hit" ] || break',
        "done",
    ]


def _srun(batch: Batch) -> list[str]:
    """Every number is said again: steps stopped inheriting some of them, and `--export` of the job is no default."""
    layout = batch.layout
    return [
        "srun --export=ALL --kill-on-bad-exit=1 --mpi=none --unbuffered",
        f"--nodes={layout.nodes} --ntasks={layout.tasks} --ntasks-per-node={layout.tasks_per_node}",
        f"--cpus-per-task={layout.cpus_per_task}",
        *(quote(option) for option in batch.step_options),
        *batch.step_words,
        *batch.wrapping.srun,
        *([" ".join(batch.wrapping.prefix)] if batch.wrapping.prefix else []),
        f'"$python" "{batch.home}/paceline.zip" </dev/null &',
    ]


def _mpirun(batch: Batch) -> list[str]:
    layout = batch.layout
    return [
        "SLURM_EXPORT_ENV=ALL OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
        f"mpirun -np {layout.tasks} --map-by ppr:{layout.tasks_per_node}:node --oversubscribe --bind-to none",
        '"${forward[@]}"',
        *([" ".join(batch.wrapping.prefix)] if batch.wrapping.prefix else []),
        f'"$python" "{batch.home}/paceline.zip" </dev/null &',
    ]


def _forwarding(batch: Batch) -> list[str]:
    if not batch.mpirun:
        return []
    return [
        "# mpirun carries to the other nodes what it is told to, by name; a name that is not set would be a warning.",
        "forward=()",
        f"for name in {' '.join(batch.forwarded)}; do",
        '    [ -n "${!name+set}" ] && forward+=(-x "$name")',
        "done",
    ]


def _folded(parts: Sequence[str]) -> list[str]:
    """One command over several lines."""
    lines = [parts[0], *(f"    {part}" for part in parts[1:])]
    return [f"{line} \\" for line in lines[:-1]] + [lines[-1]]


def _verdict(batch: Batch) -> list[str]:
    lines = """\
# What counts is the verdict of the head agent, which runs on this host: exit codes arrive garbled.
verdict=$(cat "$run/job-starts/$job_start/verdict" 2>/dev/null || echo failed)
echo "paceline: job $self: $verdict"\
""".splitlines()
    if batch.requeue:
        lines += _requeue(batch)
    return [*lines, 'case $verdict in done) exit 0 ;; stopped) exit 75 ;; *) exit 1 ;; esac']  # fmt: skip


def _requeue(batch: Batch) -> list[str]:
    again = """
# Back into the queue: after a stop, and after a failure that was the fault of a node that can be left out.
# Not after TERM (a cancelled job stays cancelled; a preempted one Slurm requeues by itself).
again=
[ "$verdict" = stopped ] && again=1
"""
    if not batch.nodelist:
        again += f"""\
reports=("$run"/job-starts/*/unfit) # nodes that agents found unfit, one name per line
[ "$verdict" = failed ] && [ -s "$run/job-starts/$job_start/unfit" ] && [ ${{#reports[@]}} -le {UNFIT_REQUEUES} ] &&
    again=1
unfit=$({{ {_first_of_exclude(batch)}cat "${{reports[@]}}" 2>/dev/null; }} | sort -u | paste -sd, -)
"""
    again += f"""\
if [ -n "$again" ] && [ -z "$ended" ] && [ ! -e "$run/cancelled" ]; then
    trap '' TERM # requeueing ends this shell by TERM; the rest must be done first
    if [ -n "$fixed" ]; then
        # A new job goes on from here once this one is gone. It is to know nothing of this one, but the user's defaults.
        kept=()
        for name in HOME USER LOGNAME SHELL LANG PATH TZ KRB5CCNAME SLURM_CONF SLURM_CLUSTERS "${{!SBATCH_@}}"; do
            [ -n "${{!name+set}}" ] && kept+=("$name=${{!name}}")
        done
        next=$(env -i "${{kept[@]}}" \\
            sbatch --parsable --dependency="afterany:$SLURM_JOB_ID"{_continuation_exclude(batch)} "$run/job.sbatch") &&
            echo "${{next%%;*}}" >"$run/job"
    else
{back_into_the_queue(batch)}    fi
fi"""
    return again.splitlines()


def back_into_the_queue(batch: Batch) -> str:
    """What sends this job there, where jobs may be requeued."""
    return f"""\
        # The controller may be away for a moment (a restart, a failover): it is asked more than once.
        for pause in 2 5 10 20 0; do
            if scontrol requeue "$self"; then
{"" if batch.nodelist else _EXCLUDE}                sleep 60 # until Slurm ends this shell
                break
            fi
            sleep "$pause"
        done
"""


# Slurm refuses to leave nodes out of a running job; a requeued one is pending.
_EXCLUDE = """\
                [ -n "$unfit" ] && scontrol update jobid="$self" ExcNodeList="$unfit"
"""


def _first_of_exclude(batch: Batch) -> str:
    """ExcNodeList replaces what was excluded at submission, so that comes along."""
    return f"echo {quote(batch.exclude)}; " if batch.exclude else ""


def _continuation_exclude(batch: Batch) -> str:
    return "" if batch.nodelist else ' ${unfit:+"--exclude=$unfit"}'
