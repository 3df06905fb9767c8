# shellcheck shell=bash
# Paceline's part of a batch script. job.sbatch sources this file, which keeps a second job out of the run folder, stops
# the ranks in time, and requeues the job. It needs only bash and Slurm, because a host may have Python only in
# containers.
#
# - Slurm sends USR1 to this shell before the time limit. The shell creates the file `stop`, which the head agent
#   polls for; the ranks then save and stop.
# - TERM means that the job was cancelled or preempted. A cancelled job stays cancelled; a preempted one is requeued by Slurm.
# - The head agent runs on this host. It writes `verdict` (done, stopped or failed) and, if the run should go back into
#   the queue, `requeue` (the nodes to exclude). The exit codes of srun and mpirun arrive garbled and are not used.

# `paceline shell` sources job.sbatch for its environment alone, with stand-ins for these functions.
[ -z "${PACELINE_SHELL:-}" ] || return 0

fail() {
    echo "paceline: error: $*" >&2
    exit 1
}

# -- one start of one job ------------------------------------------------------------------------------------

# Name this job and this start of it (a requeued job keeps its id), and read the options:
#   --no-requeue      end at the time limit
#   --exclude=NODES   nodes that the user excluded
identify_job() {
    # A task of an array is ARRAY_TASK: its plain id may mean the whole array.
    job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
    job=${job:-$SLURM_JOB_ID}
    job_start="$job-${SLURM_RESTART_COUNT:-0}"
    export PACELINE_JOB_START="$job_start"
    terminated='' interrupted='' mpirun_pid='' requeue=1 exclude=''
    local option
    for option in "$@"; do
        case $option in
            --no-requeue) requeue='' ;;
            --exclude=*) exclude=${option#*=} ;;
        esac
    done
    # Some clusters do not let jobs be requeued, whatever the script asks for: a new job continues there.
    resubmit=''
    [ -z "$requeue" ] || resubmit=$(scontrol show job "$SLURM_JOB_ID" 2>/dev/null | grep -o 'Requeue=0')
}

make_job_start_folder() {
    mkdir -p "$run/job-starts/$job_start" ||
        fail "Cannot write to $run from $HOSTNAME. The run folder must be on a shared file system."
}

# Claim the run folder: two jobs must not train in the same one. If two start at once, the last to write its id wins.
claim_run() {
    owner=$(cat "$run/job" 2>/dev/null)
    echo "$job" >"$run/job-starts/$job_start/job" && mv -f "$run/job-starts/$job_start/job" "$run/job"
    if [ -n "$owner" ] && [ "$owner" != "$job" ]; then
        case $(squeue --noheader --jobs="$owner" --format=%T 2>/dev/null) in
            RUNNING | SUSPENDED | STOPPED) echo "$owner" >"$run/job" ;;
        esac
    fi
    owner=$(cat "$run/job")
    [ "$owner" = "$job" ]
}

trap_signals() { # the function that creates the files `stop`
    # shellcheck disable=SC2064 # the function's name is known now
    trap "interrupted=1; $1" USR1
    # mpirun's processes on this host belong to the batch step, which Slurm's own TERM does not reach.
    trap 'interrupted=1; terminated=1; [ -z "$mpirun_pid" ] || kill -TERM "$mpirun_pid"' TERM
}

# Wait for a process. A trap interrupts `wait`, so wait again.
await() {
    while :; do
        interrupted=''
        wait "$1"
        [ -n "$interrupted" ] || break
    done
}

# -- the agents ----------------------------------------------------------------------------------------------

# The rendezvous of the agents: this host, and a port on which nobody answers. Every job, job start and trial tries a
# different port first. The token keeps strangers out.
open_rendezvous() {
    local port=$((20000 + (SLURM_JOB_ID * 31 + ${SLURM_RESTART_COUNT:-0} * 7 + ${1:-0} * 13) % 12000))
    while (: >"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do port=$((port + 1)); done
    PACELINE_TOKEN=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
    export PACELINE_TOKEN PACELINE_RENDEZVOUS="$HOSTNAME:$port"
}

# mpirun passes only the variables that it is given by name to other nodes, and warns about those that are not set.
forward_variables() {
    local name
    forward=()
    for name in "$@"; do
        [ -n "${!name+set}" ] && forward+=(-x "$name")
    done
}

# Write `inside`, the way into a container, to a file that every node can run. Not every script defines it.
share_container_entry() {
    declare -F inside >/dev/null || return 0
    { declare -f inside && echo 'inside "$@"'; } >"$run/job-starts/$job_start/inside.sh" || fail "Cannot write to $run."
}

# Start the agents and wait for them. All work on the nodes happens in this one step: after a cancel, a preemption or
# the time limit Slurm refuses to start another.
launch() {
    if [ -n "$terminated" ]; then
        echo "paceline: job $job was ended before its agents started"
        return 1
    fi
    share_container_entry
    if [ "$1" = mpirun ]; then
        SLURM_EXPORT_ENV=ALL OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 "$@" </dev/null &
        mpirun_pid=$!
    else
        "$@" </dev/null &
    fi
    await $!
    mpirun_pid=''
}

read_verdict() {
    verdict=$(cat "$run/job-starts/$job_start/verdict" 2>/dev/null || echo failed)
}

# -- back into the queue -------------------------------------------------------------------------------------

# The nodes to exclude, as the head agents wrote them into these files. The list replaces the user's own, so add that.
excluded_nodes() {
    local nodes
    nodes=$(cat "$@" 2>/dev/null | grep . | sort -u | paste -sd, -)
    echo "${nodes:+${exclude:+$exclude,}$nodes}"
}

requeue_job() { # NODES, to exclude
    local pause
    # The controller may be unreachable for a moment (a restart, a failover), so ask more than once.
    for pause in 2 5 10 20 0; do
        if scontrol requeue "$job"; then
            # Slurm does not exclude nodes from a running job; a requeued one is pending.
            [ -n "$1" ] && scontrol update jobid="$job" ExcNodeList="$1"
            sleep 60 # until Slurm ends this shell
            return
        fi
        sleep "$pause"
    done
}

# Submit a job that continues once this one is gone, and print its id. It inherits nothing but the user's defaults.
submit_next() {
    local name kept=() id
    for name in HOME USER LOGNAME SHELL LANG PATH TZ KRB5CCNAME SLURM_CONF SLURM_CLUSTERS "${!SBATCH_@}"; do
        [ -n "${!name+set}" ] && kept+=("$name=${!name}")
    done
    id=$(env -i "${kept[@]}" sbatch --parsable --dependency="afterany:$job" "$@") && echo "${id%%;*}"
}

# -- a single run: job.sbatch sets `run` ---------------------------------------------------------------------

start_job() { # [--no-requeue] [--exclude=NODES]
    identify_job "$@"
    # Newer versions of Slurm requeue a preempted job even if it has finished in the meantime.
    if [ "$(cat "$run/job-starts/$job-$((${SLURM_RESTART_COUNT:-0} - 1))/verdict" 2>/dev/null)" = "done" ]; then
        echo "paceline: job $job: already done"
        exit 0
    fi
    [ ! -e "$run/cancelled" ] || fail "This run was cancelled. Remove $run/cancelled to continue it."
    make_job_start_folder
    claim_run || fail "This run is already running as job $owner."
    trap_signals stop_run
    export PACELINE_RUN="$run"
}

stop_run() { : >"$run/job-starts/$job_start/stop"; }

finish_job() {
    local next nodes
    read_verdict
    echo "paceline: job $job: $verdict"
    if [ -n "$requeue" ] && [ -z "$terminated" ] && [ ! -e "$run/cancelled" ] &&
        [ -e "$run/job-starts/$job_start/requeue" ]; then
        trap '' TERM # a requeue ends this shell with TERM, and there is more to do before that
        nodes=$(excluded_nodes "$run/job-starts/$job_start/requeue")
        if [ -z "$resubmit" ]; then
            requeue_job "$nodes"
        else
            next=$(submit_next ${nodes:+"--exclude=$nodes"} "$run/job.sbatch") && echo "$next" >"$run/job"
        fi
    fi
    case $verdict in done) exit 0 ;; stopped) exit 75 ;; *) exit 1 ;; esac
}

# -- a task of a sweep: job.sbatch defines `launch_trial`, and `run_half` (Paceline on this host) --------------

start_task() { # SWEEP SUBMISSION LIST [--no-requeue] [--exclude=NODES]
    sweep=$1 submission=$2 list=$3
    identify_job "${@:4}"
    # The trials of this task are in its line of the list, after its index.
    local index line
    trials=()
    while read -r index line; do
        [ "$index" = "$SLURM_ARRAY_TASK_ID" ] && read -r -a trials <<<"$line"
    done <"$submission/$list"
    [ ${#trials[@]} -gt 0 ] || fail "$submission/$list has no trials for task $SLURM_ARRAY_TASK_ID."
    trap_signals stop_trials
}

stop_trials() {
    local trial folder
    for trial in "${trials[@]}"; do
        folder="$sweep/trials/$trial"
        [ -e "$folder/result.json" ] && continue
        mkdir -p "$folder/job-starts/$job_start" && : >"$folder/job-starts/$job_start/stop"
    done
}

# Run the trials of this task: one after the other, or in this many slots side by side.
run_trials() {
    local slot slots=() index
    if [ "$1" = 1 ]; then
        for trial in "${trials[@]}"; do run_trial "$trial"; done
        return
    fi
    for ((slot = 0; slot < $1; slot++)); do
        (
            trap_signals : # the task's own shell creates the files `stop`
            for ((index = slot; index < ${#trials[@]}; index += $1)); do run_trial "${trials[index]}"; done
        ) &
        slots+=("$!")
    done
    for slot in "${slots[@]}"; do await "$slot"; done
}

# One trial is a run with its own folder. Trials that have a result or are cancelled are skipped.
run_trial() {
    trial=$1 run="$sweep/trials/$1"
    if [ -e "$sweep/cancelled" ] || [ -e "$run/cancelled" ] || [ -e "$run/result.json" ]; then return; fi
    make_job_start_folder
    export PACELINE_RUN="$run"
    open_and_run_trial >>"$run/slurm.log" 2>&1
}

open_and_run_trial() {
    if ! claim_run; then
        echo "paceline: trial $trial is already running as job $owner"
        return
    fi
    [ -z "$terminated" ] || return
    if [ -e "$run/job-starts/$job_start/stop" ]; then # too late to begin: the next start of this task runs it
        : >"$run/job-starts/$job_start/requeue"
        return
    fi
    share_container_entry
    if ! run_half trial open "$sweep" "$submission" "$trial"; then
        # With a result: the search has no point left.
        if [ -n "$terminated" ] || [ -e "$run/result.json" ]; then return; fi
        echo failed >"$run/job-starts/$job_start/verdict"
        run_half trial close "$sweep" "$trial" failed
        return
    fi
    launch_trial
    read_verdict
    echo "paceline: job $job: trial $trial: $verdict"
    if [ -n "$requeue" ]; then
        # A trial that was stopped, or whose job is ended from outside, has no result yet.
        if [ "$verdict" = stopped ] || [ -e "$run/job-starts/$job_start/requeue" ]; then return; fi
        if [ "$verdict" = failed ] && [ -n "$terminated" ]; then return; fi
    fi
    run_half trial close "$sweep" "$trial" "$verdict"
}

finish_task() {
    local code=0 again='' files=() nodes next
    # The task is done if all its trials are, and failed if one of them is.
    for trial in "${trials[@]}"; do
        run="$sweep/trials/$trial"
        files+=("$run"/job-starts/*/requeue)
        case $(cat "$run/job-starts/$job_start/verdict" 2>/dev/null) in
            failed) code=1 ;;
            stopped) [ "$code" = 1 ] || code=75 ;;
        esac
        if [ -e "$run/job-starts/$job_start/requeue" ] && [ ! -e "$run/cancelled" ]; then again=1; fi
    done
    [ -s "$submission/logs/$job.log" ] || rm -f "$submission/logs/$job.log"
    if [ -n "$again" ] && [ -n "$requeue" ] && [ -z "$terminated" ] && [ ! -e "$sweep/cancelled" ]; then
        trap '' TERM # as in finish_job
        nodes=$(excluded_nodes "${files[@]}")
        if [ -z "$resubmit" ]; then
            requeue_job "$nodes"
        else
            next=$(submit_next ${nodes:+"--exclude=$nodes"} --array="$SLURM_ARRAY_TASK_ID" \
                "$submission/job.sbatch" "$list") &&
                for trial in "${trials[@]}"; do
                    [ -e "$sweep/trials/$trial/result.json" ] ||
                        echo "${next}_$SLURM_ARRAY_TASK_ID" >"$sweep/trials/$trial/job"
                done
        fi
    fi
    exit "$code"
}
