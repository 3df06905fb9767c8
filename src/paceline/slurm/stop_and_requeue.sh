# shellcheck shell=bash
# Paceline's part of a batch script: it keeps a second job out of the run folder, stops the ranks in time, and requeues
# the job. It needs only bash and Slurm: a host may have Python only in containers.
#
# - Slurm sends USR1 to this shell before the time limit. The shell creates the file `stop`, which the head agent polls.
# - TERM means that the job was cancelled or preempted. A cancelled job stays cancelled; Slurm requeues a preempted one.
# - The head agent runs on this host, and decides whether the run may be requeued: it then writes `requeue` (the nodes
#   to exclude), and last `verdict` (done, stopped or failed). This shell obeys, unless the run is cancelled, the job is
#   being ended, or the script has --no-requeue. If it cannot obey, it writes `requeue-failed`.
#
# The user's variables and `setup` lines run in this shell, too. So every function, and every variable that outlives a
# function, begins with `paceline_`; Slurm's variables are read before those lines run; and no command here may fail
# unhandled, because the lines may run `set -euo pipefail`.

paceline_fail() {
    echo "paceline: error: $*" >&2
    exit 1
}

# -- one start of one job --------------------------------------------------------------------------------------------

paceline_identify_job() { # [--no-requeue] [--exclude=NODES, which the user excluded]
    local option
    paceline_clean_shell
    # A task of an array is ARRAY_TASK: its plain id may mean the whole array.
    paceline_job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
    paceline_job=${paceline_job:-$SLURM_JOB_ID}
    paceline_job_number=$SLURM_JOB_ID
    paceline_restarts=${SLURM_RESTART_COUNT:-0}
    paceline_path=$PATH
    paceline_host=$(uname -n)
    paceline_terminated='' paceline_children=() paceline_requeue=1 paceline_exclude=''
    for option in "$@"; do
        case $option in
            --no-requeue) paceline_requeue='' ;;
            --exclude=*) paceline_exclude=${option#*=} ;;
        esac
    done
}

# Name this start by the job and its restart count. A controller that crashes may forget that it has started a job, and
# start it again under the same count: that start gets a name of its own, such as 7-0_2.
paceline_begin_job_start() { # FOLDER of names
    local number=1 shown submitted
    paceline_job_start="$paceline_job-$paceline_restarts"
    mkdir -p "$1" || paceline_fail "Cannot write to $1 from $paceline_host. It must be on a shared file system."
    until mkdir "$1/$paceline_job_start" 2>/dev/null; do
        [ -d "$1/$paceline_job_start" ] || paceline_fail "Cannot write to $1 from $paceline_host."
        number=$((number + 1))
        paceline_job_start="$paceline_job-${paceline_restarts}_$number"
    done
    export PACELINE_JOB_START="$paceline_job_start"
    paceline_trap_signals # Slurm may keep this script waiting from here on
    # Some clusters do not allow requeueing, and others have no scontrol on their nodes: a new job continues the run.
    paceline_resubmit='' paceline_queued_at=''
    [ -n "$paceline_requeue" ] || return 0
    command -v scontrol >/dev/null || paceline_resubmit=no-scontrol
    shown=$(paceline_show_job "$paceline_job_number") || :
    if grep '^ *Requeue=0 Restarts=' <<<"$shown" >/dev/null; then paceline_resubmit=no-requeue; fi
    # Slurm updates this time when it requeues a job. After a node failure, no other source has it.
    submitted=$(grep -m 1 -o '^ *SubmitTime=[^ ]*' <<<"$shown") || return 0
    paceline_queued_at=$(date -d "${submitted#*=}" +%s 2>/dev/null) || :
}

# Ask Slurm with this command, with a time limit: signals are not handled until it returns.
paceline_ask() { timeout -k 5 "${paceline_patience:-20}" "$@"; }

paceline_show_job() { SLURM_TIME_FORMAT=standard paceline_ask scontrol --all show job "$1" 2>/dev/null; } # ID

# squeue for all jobs, whatever SQUEUE_* variables the user has set: these are options, such as a partition.
paceline_squeue() {
    (
        unset "${!SQUEUE_@}" || :
        paceline_ask squeue --all --noheader "$@"
    )
}

# Undo what the user's start-up files and lines may have changed in how this shell reads words, patterns and files.
paceline_clean_shell() {
    unset IFS GLOBIGNORE
    set +o noclobber +o noglob
    shopt -u failglob nullglob nocasematch
}

# The same after the user's lines, and append this script's PATH to theirs, and restore the traps for Slurm's signals.
paceline_restore_shell() {
    paceline_clean_shell
    [[ ":$PATH:" = *":$paceline_path:"* ]] || PATH="$PATH:$paceline_path"
    paceline_trap_signals
}

paceline_trap_signals() {
    trap 'paceline_interrupted=1; paceline_stop' USR1
    trap paceline_terminate TERM
}

paceline_stop() { # trials without a result stop, or do not begin
    local run
    for run in "${paceline_runs[@]}"; do
        paceline_has_result "$run" || { mkdir -p "$run/job-starts/$paceline_job_start" && : >"$run/job-starts/$paceline_job_start/stop"; } || :
    done
}

# Whether a folder is that of a trial with a result. In other run folders, such a file is the user's own.
paceline_has_result() { [ -n "$paceline_sweep" ] && [ -e "$1/result.json" ]; }

# mpirun's processes on this host belong to the batch step, which Slurm's own TERM does not reach.
paceline_terminate() {
    local child
    paceline_interrupted=1 paceline_terminated=1
    for child in ${paceline_children[@]+"${paceline_children[@]}"}; do kill -TERM "$child" 2>/dev/null || :; done
}

# Wait for a process, and set paceline_exit to its exit code. A trap interrupts `wait`, the user's too: wait again.
paceline_await() {
    while :; do
        paceline_interrupted='' paceline_exit=0
        wait "$1" || paceline_exit=$?
        [ -n "$paceline_interrupted" ] || { [ "$paceline_exit" -gt 128 ] && kill -0 "$1" 2>/dev/null; } || break
    done
}

paceline_make_job_start_folder() {
    paceline_folder="$paceline_run/job-starts/$paceline_job_start"
    mkdir -p "$paceline_folder" || paceline_fail "Cannot write to $paceline_run from $paceline_host."
    # For the head agent, for the time line.
    [ -z "$paceline_queued_at" ] || echo "$paceline_queued_at" >"$paceline_folder/queued-at" || :
    export PACELINE_RUN="$paceline_run"
}

# Claim the run folder: two jobs must not train in the same one. claims/1, claims/2, ... are links that name job starts,
# and the last one has the run folder. Making a link is atomic: exactly one of those that find the last one over succeeds.
paceline_claim_run() {
    mkdir -p "$paceline_run/claims" || paceline_fail "Cannot write to $paceline_run from $paceline_host."
    while :; do
        paceline_find_owner
        [ "$paceline_owner" != "$paceline_job_start" ] || break
        # An earlier start of this job is over: Slurm has started it again.
        case $paceline_owner in '' | "$paceline_job"-*) ;; *) paceline_is_over "$paceline_owner" || return 1 ;; esac
        ln -s "$paceline_job_start" "$paceline_run/claims/$((paceline_claims + 1))" 2>/dev/null ||
            [ -L "$paceline_run/claims/$((paceline_claims + 1))" ] ||
            paceline_fail "Cannot write to $paceline_run/claims."
    done
    echo "$paceline_job" >"$paceline_run/job" || :
}

paceline_find_owner() {
    paceline_claims=0
    while [ -L "$paceline_run/claims/$((paceline_claims + 1))" ]; do paceline_claims=$((paceline_claims + 1)); done
    paceline_owner=$(readlink "$paceline_run/claims/$paceline_claims") || :
}

# Whether another job start is over. If Slurm cannot tell, its head agent must have written a verdict.
paceline_is_over() {
    local pause state
    for pause in 1 2 5 10 20; do
        if [[ $1 = pid-* ]]; then # it runs outside of Slurm
            [ -e "$paceline_run/job-starts/$1/process" ] && ! paceline_has_verdict "$1" || return 0
            echo "paceline: error: This run is running outside Slurm. If it has ended, remove" \
                "$paceline_run/job-starts/$1/process." >&2
            return 1
        fi
        # Read standard output alone: a site's warning on standard error is not a state.
        if state=$(paceline_squeue --jobs="${1%-*}" --format=%T 2>/dev/null); then
            case $state in
                RUNNING | SUSPENDED | STOPPED | RESIZING | SIGNALING | STAGE_OUT) break ;;
                '' | PENDING | CONFIGURING | REQUEUED | REQUEUE_FED | REQUEUE_HOLD | RESV_DEL_HOLD | COMPLETED | CANCELLED | \
                    FAILED | TIMEOUT | DEADLINE | PREEMPTED | OUT_OF_MEMORY | NODE_FAIL | BOOT_FAIL | LAUNCH_FAILED | \
                    RECONFIG_FAIL | REVOKED | SPECIAL_EXIT) return 0 ;;
            esac
        else
            state=$(paceline_squeue --jobs="${1%-*}" --format=%T 2>&1 >/dev/null) || :
            [[ $state != *"Invalid job id"* ]] || return 0
        fi
        ! paceline_has_verdict "$1" || return 0 # it is ending, or Slurm gives no answer that is known here
        sleep "$pause" || :
    done
    echo "paceline: error: This run is already running as job ${1%-*}." >&2
    return 1
}

# A file that is empty or truncated, because the disk was full, is not a verdict.
paceline_verdict_of() { # JOB_START
    local verdict
    verdict=$(cat "$paceline_run/job-starts/$1/verdict" 2>/dev/null) || :
    case $verdict in done | stopped | failed) echo "$verdict" ;; *) return 1 ;; esac
}

paceline_has_verdict() { paceline_verdict_of "$1" >/dev/null; } # JOB_START

# -- the agents ------------------------------------------------------------------------------------------------------

# The rendezvous of the agents: this host, and a port that is different for every job, job start and trial. If the port
# is taken, the head agent chooses another and tells the others. The token keeps strangers out.
paceline_open_rendezvous() { # [NUMBER of a trial or of a further start]
    paceline_restore_shell
    local port=$((20000 + (paceline_job_number * 31 + paceline_restarts * 7 + ${1:-0} * 13) % 12000))
    PACELINE_TOKEN=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
    export PACELINE_TOKEN PACELINE_RENDEZVOUS="$paceline_host:$port"
}

# Write `paceline_inside`, the way into a container if there is one, to a file that every node can run.
paceline_share_container_entry() {
    declare -F paceline_inside >/dev/null || return 0
    { declare -f paceline_inside && echo 'paceline_inside "$@"'; } >"$paceline_folder/inside.sh" ||
        paceline_fail "Cannot write to $paceline_run."
}

# Start the agents and wait for them, again if one of them was killed. All work on the nodes happens in this one
# step: after a cancel, a preemption or the time limit Slurm refuses to start another.
#
# The head agent allows the restarts that the user wants. These starts may fail before there is one: srun kills it if it
# cannot reach another node. If that node is dead, Slurm notices within minutes (SlurmdTimeout) and requeues the job:
# the pauses add up to six minutes.
paceline_launch() {
    local number=0 starts=0 saved
    local -a start=("$@")
    # mpirun starts its daemons with srun, and refuses root unless it is told otherwise
    [ "$1" != mpirun ] || start=(env SLURM_EXPORT_ENV=ALL OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 "$@")
    paceline_restore_shell
    [ -z "$paceline_terminated" ] || echo "paceline: job $paceline_job was ended before its agents started"
    paceline_share_container_entry
    while [ "$number" -lt 20 ] && [ -z "$paceline_terminated" ]; do
        number=$((number + 1)) starts=$((starts + 1))
        saved=$(paceline_list_checkpoints)
        "${start[@]}" </dev/null &
        if [ "$1" = mpirun ]; then paceline_children=($!); fi
        paceline_await_agents $!
        paceline_children=()
        paceline_has_no_verdict || break
        if [ -e "$paceline_folder/srun-killed" ]; then
            # The step of the dead srun keeps the cores until Slurm notices what became of the node.
            echo "paceline: job $paceline_job: srun waited for a node that is not responding"
            if [ -n "$paceline_requeue" ]; then paceline_decide_without_agent stopped; else paceline_decide_without_agent failed; fi
            break
        fi
        # If the head agent was killed before it left a sign, only the exit code says so, or another agent's: try again.
        [ -e "$paceline_folder/agent" ] || [ -e "$paceline_folder/head" ] ||
            { [ "$paceline_exit" = 137 ] && [ "$number" -le 3 ]; } || break
        [ "$(paceline_list_checkpoints)" = "$saved" ] || number=1 # the run got further, so count from the start again
        echo "paceline: job $paceline_job: an agent was killed; starting the agents again"
        sleep $((number < 16 ? 2 * number - 2 : 30)) & # a signal ends the pause
        wait $! || :
        rm -f "$paceline_folder"/{head,node-lost,join-error-*} || :
        [ -z "${PACELINE_RENDEZVOUS-}" ] || paceline_open_rendezvous "$((starts * 101))"
    done
}

# Wait for srun or mpirun. It could wait until the time limit for a node that died and came back: it has one minute once
# the head agent has ended because another agent is gone. `read` waits without a process.
paceline_await_agents() {
    local paceline_watcher _
    (
        trap - USR1 TERM
        exec {paceline_never}<> <(:)
        until [ -e "$paceline_folder/node-lost" ]; do
            kill -0 $$ || exit 0 # this job's shell was killed
            read -r -t "${paceline_poll:-5}" -u "$paceline_never" || :
        done
        for _ in {1..12}; do read -r -t "${paceline_poll:-5}" -u "$paceline_never" || :; done
        : >"$paceline_folder/srun-killed"
        kill -KILL "$1"
    ) 2>/dev/null &
    paceline_watcher=$!
    paceline_await "$1"
    kill "$paceline_watcher" 2>/dev/null || :
    wait "$paceline_watcher" 2>/dev/null || :
}

paceline_list_checkpoints() { echo "$paceline_run"/checkpoints/*/complete.json; }

# Whether the agents have left no verdict, although nobody ended the job.
paceline_has_no_verdict() {
    [ -z "$paceline_terminated" ] && [ ! -e "$paceline_run/cancelled" ] && ! paceline_has_verdict "$paceline_job_start"
}

# Decide in place of the head agent: a stopped run goes on in a later start, if it may.
paceline_decide_without_agent() { # VERDICT
    [ "$1" != stopped ] || [ -z "$paceline_requeue" ] || : >"$paceline_folder/requeue" || :
    echo "$1" >"$paceline_folder/verdict" || :
}

# -- requeue ---------------------------------------------------------------------------------------------------------

# Whether the head agent wants a requeue. It writes the verdict last: without one, it did not get to the end.
paceline_wants_requeue() { [ -e "$paceline_folder/requeue" ] && paceline_has_verdict "$paceline_job_start"; }

# Whether to obey: Slurm itself requeues a job that it preempts, and a cancelled run stays cancelled.
paceline_may_requeue() {
    [ -n "$paceline_requeue" ] && paceline_wants_requeue && [ -z "$paceline_terminated" ] &&
        [ ! -e "$paceline_run/cancelled" ]
}

# Requeue this job or, if that is not possible, submit one that continues the run; paceline_next is its id. If neither
# works, files named `requeue-failed` in the folders `paceline_folders` say why.
paceline_return_to_queue() { # the script and its arguments
    local nodes folder
    # The nodes to exclude, as the head agents wrote them. The list replaces the user's own, so add that.
    nodes=$(cat "${paceline_folders[@]/%//requeue}" | grep . | sort -u | paste -sd, -) || :
    nodes=${nodes:+${paceline_exclude:+$paceline_exclude,}$nodes}
    trap '' TERM # a requeue ends this shell with TERM, and there is more to do before that
    paceline_next='' paceline_problem=''
    [ -n "$paceline_resubmit" ] || paceline_requeue_job "$nodes"
    [ -z "$paceline_resubmit" ] || paceline_submit_next ${nodes:+"--exclude=$nodes"} "$@"
    [ -n "$paceline_problem" ] || return 0
    echo "paceline: error: Cannot requeue this run: $paceline_problem" >&2
    for folder in "${paceline_folders[@]}"; do echo "$paceline_problem" >"$folder/requeue-failed" || :; done
}

# Afterwards paceline_problem says why not. Ask again if the controller is unreachable for a moment, or if it crashed just
# after it had accepted the requeue, and forgot it: the job is running then.
paceline_requeue_job() { # NODES, to exclude
    local pause
    paceline_problem=unknown
    for pause in 1 2 5 10 20 20; do
        if [ -n "$paceline_problem" ] || paceline_show_job "$paceline_job" | grep '^ *JobState=RUNNING' >/dev/null; then
            if paceline_problem=$(scontrol requeue "$paceline_job" 2>&1); then
                paceline_problem=''
            else
                paceline_problem=$(paceline_one_line "${paceline_problem:-scontrol failed}")
                echo "paceline: $paceline_problem" >&2
            fi
            case $paceline_problem in
                *[Dd]enied* | *disabled* | *"not supported"* | *"not permitted"*) # and another try would change nothing
                    paceline_resubmit=refused
                    return 0
                    ;;
                # Slurm has requeued it already: it is being preempted, or the controller was too slow to answer.
                *"pending execution"*) paceline_problem='' ;;
            esac
            # Slurm does not exclude nodes from a running job; a requeued one is pending.
            [ -n "$paceline_problem" ] || [ -z "$1" ] || scontrol update jobid="$paceline_job" ExcNodeList="$1" || :
        fi
        sleep "$pause" || : # until Slurm ends this shell
    done
}

paceline_one_line() { tr -s '\n' ' ' <<<"$1"; }

# Submit a job that continues once this one is gone. It inherits nothing but the user's defaults. Other users can read
# the command line of `env`, so the token is not on it.
paceline_submit_next() { # the arguments of sbatch
    local name kept=() id
    for name in HOME USER LOGNAME SHELL LANG LC_ALL PATH TZ KRB5CCNAME SLURM_CONF SLURM_CLUSTERS "${!SBATCH_@}"; do
        if [ -n "${!name+set}" ]; then kept+=("$name=${!name}"); fi
    done
    # shellcheck disable=SC2016 # the inner shell expands it
    if id=$(env -i "${kept[@]}" "$BASH" -c 'read -r token; [ -z "$token" ] || export SLURM_JWT=$token
        exec sbatch --parsable "$@" </dev/null' - --dependency="afterany:$paceline_job" "$@" 2>&1 <<<"${SLURM_JWT:-}"); then
        # A site's wrapper around sbatch may print more than the id.
        id=$(grep -Eo '^[0-9]+(;|$)' <<<"$id" | tail -n 1) || :
        paceline_next=${id%;} paceline_problem=''
        return 0
    fi
    paceline_problem=$(paceline_one_line "${id:-sbatch failed}")
    # A slow controller may have accepted the job anyway; if so, a pending job depends on this one.
    case $paceline_problem in *"timed out"* | *"receive failure"* | *"send failure"*) ;; *) return 0 ;; esac
    for name in 5 15 30; do
        sleep "$name" || :
        id=$(paceline_squeue --me --states=PENDING --format='%F %E' 2>/dev/null |
            grep -E " afterany:$paceline_job(\(|$)" | tail -n 1) || :
        [ -n "$id" ] || continue
        paceline_next=${id%% *} paceline_problem=''
        return 0
    done
}

# -- a single run: job.sbatch sets `paceline_run` --------------------------------------------------------------------

paceline_start_job() { # [--no-requeue] [--exclude=NODES]
    [ -n "${SLURM_JOB_ID:-}" ] || paceline_fail "This is a batch script for Slurm. Submit it: sbatch $0"
    paceline_identify_job "$@"
    paceline_runs=("$paceline_run") paceline_sweep=''
    paceline_begin_job_start "$paceline_run/job-starts"
    paceline_make_job_start_folder
    ! paceline_was_done || paceline_withdraw 0 "paceline: job $paceline_job: already done"
    [ ! -e "$paceline_run/cancelled" ] || paceline_withdraw 1 \
        "paceline: error: This run was cancelled. To continue it: paceline submit --resume ${paceline_run##*/}"
    paceline_claim_run || paceline_withdraw 1 "paceline: job $paceline_job does not start"
}

paceline_withdraw() { # EXIT_CODE WHY
    rm -rf "${paceline_folder:?}" || :
    echo "$2"
    exit "$1"
}

# Whether the last start of this job was done: newer versions of Slurm requeue a preempted job even if it has finished.
paceline_was_done() {
    paceline_find_owner
    [ "$paceline_restarts" != 0 ] && [ "${paceline_owner%-*}" = "$paceline_job" ] &&
        [ "$(paceline_verdict_of "$paceline_owner")" = "done" ]
}

paceline_finish_job() { paceline_finish "" "$paceline_run/job.sbatch"; }

# Requeue this job if a run of it wants that. The job is done if all its runs are, and failed if one of them is.
paceline_finish() { # what follows the id of the next job, then the script and its arguments
    local code=0 suffix=$1
    paceline_restore_shell
    paceline_folders=()
    for paceline_run in "${paceline_runs[@]}"; do
        paceline_folder="$paceline_run/job-starts/$paceline_job_start"
        if ! paceline_verdict=$(paceline_verdict_of "$paceline_job_start"); then
            [ -z "$suffix" ] || continue # a trial that did not run, or whose result says why it failed
            paceline_verdict=failed
        fi
        [ -n "$suffix" ] || echo "paceline: job $paceline_job: $paceline_verdict"
        if paceline_has_no_verdict; then
            paceline_problem="the agents ended without a verdict; $paceline_run/slurm.log says why"
            echo "$paceline_problem" >"$paceline_folder/requeue-failed" || :
        fi
        if paceline_may_requeue; then paceline_folders+=("$paceline_folder"); fi
        case $paceline_verdict in
            stopped) [ "$code" = 1 ] || code=75 ;;
            failed) code=1 ;;
            # If the last state could not be saved, what depends on the run must not start.
            *) [ ! -e "$paceline_folder/unsaved" ] || code=1 ;;
        esac
    done
    [ ${#paceline_folders[@]} -gt 0 ] && [ ! -e "${paceline_sweep:-$paceline_run}/cancelled" ] || exit "$code"
    paceline_return_to_queue "${@:2}"
    for paceline_run in "${paceline_runs[@]}"; do
        [ -z "$paceline_next" ] || paceline_has_result "$paceline_run" ||
            echo "$paceline_next$suffix" >"$paceline_run/job" || :
    done
    exit "$code"
}

# -- a task of a sweep: job.sbatch defines `paceline_launch_trial`, and `paceline_run_half` (Paceline on this host) --

paceline_start_task() { # SWEEP SUBMISSION LIST [--no-requeue] [--exclude=NODES]
    local trials trial
    paceline_sweep=$1 paceline_submission=$2 paceline_list=$3
    [ -n "${SLURM_ARRAY_TASK_ID:-}" ] || paceline_fail "This is the batch script of an array. Submit it: sbatch" \
        "--array=TASKS $2/job.sbatch $3, where TASKS are among the first numbers of the lines of $2/$3."
    paceline_identify_job "${@:4}"
    [ ! -e "$2/cancelled-$3" ] || paceline_fail "This array was cancelled: its submission was not confirmed."
    read -r -a trials < <(sed -n "s/^$SLURM_ARRAY_TASK_ID //p" "$2/$3") ||
        paceline_fail "$2/$3 has no trials for task $SLURM_ARRAY_TASK_ID."
    paceline_runs=()
    for trial in "${trials[@]}"; do paceline_runs+=("$1/trials/$trial"); done # bash replaces `&` in ${x/#/PATH}
    paceline_begin_job_start "$2/job-starts"
}

# Run the trials of this task side by side. A local variable would hide the user's in the trials: these have the prefix.
paceline_run_trials() { # SLOTS
    local paceline_slot paceline_index
    paceline_restore_shell
    for ((paceline_slot = 0; paceline_slot < $1; paceline_slot++)); do
        (
            paceline_trap_signals # a new shell has none
            for ((paceline_index = paceline_slot; paceline_index < ${#paceline_runs[@]}; paceline_index += $1)); do
                paceline_run_trial "${paceline_runs[paceline_index]}"
            done
        ) &
        paceline_children+=("$!")
    done
    for paceline_slot in "${paceline_children[@]}"; do paceline_await "$paceline_slot"; done
}

# One trial is a run with its own folder. Those that have a result or are cancelled are skipped.
paceline_run_trial() { # its folder
    paceline_run=$1 paceline_trial=${1##*/}
    [ ! -e "$paceline_sweep/cancelled" ] && [ ! -e "$1/cancelled" ] && [ ! -e "$1/result.json" ] || return 0
    paceline_make_job_start_folder
    paceline_open_and_close_trial >>"$1/slurm.log" 2>&1 || : # the next trial runs in any case
}

paceline_open_and_close_trial() {
    paceline_claim_run && [ -z "$paceline_terminated" ] || return
    if [ -e "$paceline_folder/stop" ]; then
        paceline_decide_without_agent stopped
        return
    fi
    paceline_share_container_entry
    if paceline_run_half trial open "$paceline_sweep" "$paceline_submission" "$paceline_trial"; then
        paceline_launch_trial
    elif [ -n "$paceline_terminated" ] || [ -e "$paceline_run/result.json" ]; then
        return # a result means that the search has no points left
    else
        paceline_decide_without_agent failed
    fi
    paceline_verdict=$(paceline_verdict_of "$paceline_job_start") || paceline_verdict=failed
    echo "paceline: job $paceline_job: trial $paceline_trial: $paceline_verdict"
    # A trial that goes on in a later start has no result yet, nor one that was ended with a job that Slurm may requeue.
    if paceline_wants_requeue || [ "$paceline_verdict$paceline_terminated$paceline_requeue" = failed11 ]; then return; fi
    paceline_run_half trial close "$paceline_sweep" "$paceline_submission" "$paceline_trial" "$paceline_verdict"
}

paceline_finish_task() {
    local task=${paceline_job#*_} log="$paceline_submission/logs/$paceline_job.log"
    [ -s "$log" ] || rm -f "$log" || :
    paceline_finish "_$task" "--array=$task" "$paceline_submission/job.sbatch" "$paceline_list"
}
