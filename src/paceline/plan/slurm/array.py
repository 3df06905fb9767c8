"""The script of a sweep: a job array whose tasks run trials, each a run of its own in a folder of its own.

The same bash as `job.sbatch` of a single run, around a function that runs one trial. A task has one trial or several,
one after the other or side by side; which, a list says that was written when it was submitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.errors import SpecError
from paceline.plan.quote import quote
from paceline.plan.slurm import script as batches
from paceline.plan.slurm.directives import Directive, Layout, file_pattern
from paceline.plan.slurm.script import Batch
from paceline.spec import Job
from paceline.spec.quantities import slurm_size


@dataclass(frozen=True)
class Trials:
    """What the tasks of an array run."""

    sweep: Path  # the sweep's folder
    pack: int = 1  # trials side by side in one job

    def whole(self, job: Job, layout: Layout) -> Layout:
        """What a task asks for, so that each trial in it has `layout`."""
        if self.pack == 1:
            return layout
        if layout.nodes > 1:
            raise SpecError(
                f"{job.source('job.nodes')} is {layout.nodes}, and --pack puts {self.pack} trials on one node",
                hint="leave --pack out, or ask for one node per trial",
            )
        if job.launch.style == "mpirun":
            raise SpecError(
                f'{job.source("launch.style")} is "mpirun", which takes the whole job, and --pack is {self.pack}',
                hint="leave --pack out, or use another style",
            )
        return replace(
            layout,
            nproc=layout.nproc * self.pack,
            gpus=layout.gpus * self.pack,
            tasks_per_node=layout.tasks_per_node * self.pack,
        )

    def directives(self, job: Job, found: Sequence[Directive], folder: Path) -> list[Directive]:
        """Those of a single run, for the tasks of an array."""
        log = file_pattern(str(folder / "logs")) + "/%A_%a.log"
        made = [Directive("output", log) if each.option == "output" else each for each in found]
        memory = job.resources.mem_per_node
        if memory is not None and self.pack > 1:
            size = slurm_size(memory * self.pack)
            made = [Directive("mem", size) if each.option == "mem" else each for each in made]
        return made


def render_array(batch: Batch, trials: Trials) -> str:
    """The whole script. `batch.layout` is that of one trial, `batch.directives` those of a task."""
    batch = replace(batch, home="$kit", salt=" + number * 13", **_shares(batch, trials))
    sections = [
        batches.head_lines(
            batch,
            "Written by Paceline. Plain bash and Slurm. Each task runs the trials that its line in a list names:",
            "sbatch --array=0-9 job.sbatch tasks-1",
        ),
        _identity(batch, trials),
        batches.environment_lines(batch),
        _trial(batch),
        _all_trials(trials),
        _after(batch),
    ]
    return batches.joined(sections)


def _identity(batch: Batch, trials: Trials) -> list[str]:
    return f"""\
sweep={quote(str(trials.sweep))} # everything about this sweep is in this folder
kit={quote(str(batch.folder.path))} # what came along when it was submitted
python={quote(batch.python)}

fail() {{
    echo "paceline: $*" >&2
    exit 1
}}

# This task's own name, and the name of this start of it: a task that goes back into the queue keeps its id.
self="${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID"
job_start="$self-${{SLURM_RESTART_COUNT:-0}}"

{batches.fixed_lines(batch)}# The trials of this task: in its line of the list, after its index.
numbers=()
while read -r index line; do
    [ "$index" = "$SLURM_ARRAY_TASK_ID" ] && read -r -a numbers <<<"$line"
done <"$kit/${{1:-tasks-1}}"
[ ${{#numbers[@]}} -gt 0 ] || fail "$kit/${{1:-tasks-1}} names no trials for task $SLURM_ARRAY_TASK_ID"

# Before the time limit Slurm sends USR1 to this shell: the head agents see the files `stop`, the ranks save and
# stop. TERM means that somebody wants the job gone.
# shellcheck disable=SC2317 # the trap calls it
ask_to_stop() {{
    local each
    hit=1
    for each in "${{numbers[@]}}"; do
        [ -e "$sweep/trials/$each/result.json" ] && continue
        mkdir -p "$sweep/trials/$each/job-starts/$job_start" && : >"$sweep/trials/$each/job-starts/$job_start/stop"
    done
}}
ended='' hit='' pid=''
trap ask_to_stop USR1
trap 'hit=1; ended=1{batches.pass_on(batch)}' TERM\
""".splitlines()


def _trial(batch: Batch) -> list[str]:
    # The way into the container is known before the launch: the trial is opened in there.
    known = replace(batch, wrapping=replace(batch.wrapping, hand_out=[]))
    return f"""\
# One trial, from its opening to its result: a run of its own, in a folder of its own. Those that have a result, and
# those that somebody cancelled, are passed over.
trial() {{
    number=$1 run="$sweep/trials/$1"
    if [ -e "$sweep/cancelled" ] || [ -e "$run/cancelled" ] || [ -e "$run/result.json" ]; then return; fi
    mkdir -p "$run/job-starts/$job_start" || fail "cannot write to $run from $HOSTNAME: is it on a shared file system?"
    attempt >>"$run/slurm.log" 2>&1
}}

attempt() {{
    # Two jobs must not train in one folder. Of two that start at once, the last to write its name here goes on.
    other=$(cat "$run/job" 2>/dev/null)
    echo "$self" >"$run/job-starts/$job_start/job" && mv -f "$run/job-starts/$job_start/job" "$run/job"
    if [ -n "$other" ] && [ "$other" != "$self" ]; then
        case $(squeue --noheader --jobs="$other" --format=%T 2>/dev/null) in
            RUNNING | SUSPENDED | STOPPED) echo "$other" >"$run/job" ;;
        esac
    fi
    other=$(cat "$run/job")
    if [ "$other" != "$self" ]; then
        echo "paceline: trial $number is live already, as job $other"
        return
    fi

    # Not begun any more once it is to stop: it waits for the next start of this task.
    if [ -n "$ended" ]; then return; fi
    if [ -e "$run/job-starts/$job_start/stop" ]; then
        : >"$run/job-starts/$job_start/again"
        return
    fi
    export PACELINE_RUN="$run"
{_indented(batch.wrapping.hand_out)}    if ! {_helper(batch)} trial open "$sweep" "$kit" "$number"; then
        if [ -n "$ended" ] || [ -e "$run/result.json" ]; then return; fi # there: the search has no point left
        echo failed >"$run/job-starts/$job_start/verdict"
        {_helper(batch)} trial close "$sweep" "$number" failed
        return
    fi
{_indented(batches.meeting_lines(batch))}{_indented(batches.launch_lines(known))}
    # What counts is the verdict of the head agent, which runs on this host: exit codes arrive garbled.
    verdict=$(cat "$run/job-starts/$job_start/verdict" 2>/dev/null || echo failed)
    echo "paceline: job $self: trial $number: $verdict"
{_indented(_conclusion(batch))}}}""".splitlines()


def _helper(batch: Batch) -> str:
    """How the run half is called here, on the batch host: in the container, where there is one."""
    within = [*batch.wrapping.prefix]
    if batch.wrapping.srun:
        within = ["srun --export=ALL --nodes=1 --ntasks=1 --mpi=none", *batch.wrapping.srun]
    return " ".join([*within, '"$python" "$kit/paceline.zip"'])


def _shares(batch: Batch, trials: Trials) -> dict[str, Any]:
    """What a trial takes of a job that several share."""
    if trials.pack == 1:
        return {}
    options = [*batch.step_options, "--exact"]
    if not batch.step_options:
        asked = next((each.value or "" for each in batch.directives if each.option == "gres"), "")
        options.append(f"--gres={asked.rpartition(':')[0]}:{batch.layout.gpus}" if asked else "--gres=none")
    # A step takes all memory of its job unless told otherwise, and the others would wait for it.
    share = f"${{SLURM_MEM_PER_NODE:+--mem=$((SLURM_MEM_PER_NODE / {trials.pack}))M}}"
    return {"step_options": options, "step_words": [share]}


def _conclusion(batch: Batch) -> list[str]:
    if not batch.requeue:
        return [f'{_helper(batch)} trial close "$sweep" "$number" "$verdict"']
    lines = [
        '[ "$verdict" = stopped ] && [ -z "$ended" ] && [ ! -e "$run/cancelled" ] &&',
        '    : >"$run/job-starts/$job_start/again"',
    ]
    if not batch.nodelist:
        lines += [
            'reports=("$run"/job-starts/*/unfit) # nodes that agents found unfit, one name per line',
            '[ "$verdict" = failed ] && [ -s "$run/job-starts/$job_start/unfit" ] &&',
            f'    [ ${{#reports[@]}} -le {batches.UNFIT_REQUEUES} ] && : >"$run/job-starts/$job_start/again"',
        ]
    return [
        *lines,
        "# A trial that was stopped, or whose job is ended from outside, has no result yet.",
        '[ "$verdict" = stopped ] || [ -e "$run/job-starts/$job_start/again" ] && return',
        '[ "$verdict" = failed ] && [ -n "$ended" ] && return',
        f'{_helper(batch)} trial close "$sweep" "$number" "$verdict"',
    ]


def _indented(lines: Sequence[str]) -> str:
    return "".join(f"    {line}\n" for line in lines)


def _all_trials(trials: Trials) -> list[str]:
    if trials.pack == 1:
        return ['for number in "${numbers[@]}"; do trial "$number"; done']
    return f"""\
# Side by side: as many at a time as the job has room for.
slots=()
for ((slot = 0; slot < {trials.pack}; slot++)); do
    (
        trap 'hit=1' USR1
        trap 'hit=1; ended=1' TERM
        for ((at = slot; at < ${{#numbers[@]}}; at += {trials.pack})); do trial "${{numbers[at]}}"; done
    ) &
    slots+=("$!")
done
for slot in "${{slots[@]}}"; do
    while :; do # a trap interrupts `wait`: wait again
        hit=
        wait "$slot"
        [ -n "$hit" ] || break
    done
done""".splitlines()


def _after(batch: Batch) -> list[str]:
    lines = """\
# What the task tells Slurm: done where all its trials are, failed where one has failed.
code=0
for number in "${numbers[@]}"; do
    case $(cat "$sweep/trials/$number/job-starts/$job_start/verdict" 2>/dev/null) in
        failed) code=1 ;;
        stopped) [ "$code" = 1 ] || code=75 ;;
    esac
done
[ -s "$kit/logs/$self.log" ] || rm -f "$kit/logs/$self.log"\
""".splitlines()
    if batch.requeue:
        lines += _requeue(batch)
    return [*lines, 'exit "$code"']


def _requeue(batch: Batch) -> list[str]:
    unfit = ""
    if not batch.nodelist:
        first = f"echo {quote(batch.exclude)}; " if batch.exclude else ""
        unfit = f"""\
unfit=$({{ {first}for number in "${{numbers[@]}}"; do cat "$sweep/trials/$number"/job-starts/*/unfit; done; }} \\
    2>/dev/null | sort -u | paste -sd, -)
"""
    continuation = "" if batch.nodelist else ' ${unfit:+"--exclude=$unfit"}'
    return f"""
# Back into the queue, where trials have stopped or a node is to be left out. Not after TERM (a cancelled job stays
# cancelled; a preempted one Slurm requeues by itself).
again=
for number in "${{numbers[@]}}"; do [ -e "$sweep/trials/$number/job-starts/$job_start/again" ] && again=1; done
{unfit}if [ -n "$again" ] && [ -z "$ended" ] && [ ! -e "$sweep/cancelled" ]; then
    trap '' TERM # requeueing ends this shell by TERM; the rest must be done first
    if [ -n "$fixed" ]; then
        # A new job goes on from here once this one is gone. It is to know nothing of this one, but the user's defaults.
        kept=()
        for name in HOME USER LOGNAME SHELL LANG PATH TZ KRB5CCNAME SLURM_CONF SLURM_CLUSTERS "${{!SBATCH_@}}"; do
            [ -n "${{!name+set}}" ] && kept+=("$name=${{!name}}")
        done
        next=$(env -i "${{kept[@]}}" sbatch --parsable --dependency="afterany:$self" \\
            --array="$SLURM_ARRAY_TASK_ID"{continuation} "$kit/job.sbatch" "${{1:-tasks-1}}") &&
            for number in "${{numbers[@]}}"; do
                [ -e "$sweep/trials/$number/result.json" ] ||
                    echo "${{next%%;*}}_$SLURM_ARRAY_TASK_ID" >"$sweep/trials/$number/job"
            done
    else
{batches.back_into_the_queue(batch)}    fi
fi""".splitlines()
