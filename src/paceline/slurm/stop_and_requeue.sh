# shellcheck shell=bash
# Paceline's part of a batch script. job.sbatch sources this file, which keeps a second job out of the run folder, stops
# the ranks in time, and requeues the job. It needs only bash and Slurm, because a host may have Python only in
# containers.
#
# - Slurm sends USR1 to this shell before the time limit. The shell creates the file `stop`, which the head agent
#   polls for; the ranks then save and stop.
# - TERM means that the job was cancelled or preempted. A cancelled job stays cancelled; Slurm requeues a preempted one.
# - The head agent runs on this host. It decides whether the run may be requeued: it then writes `requeue` (the
#   nodes to exclude), and last `verdict` (done, stopped or failed). This shell obeys, unless the run is cancelled, the
#   job is being ended, or somebody has added --no-requeue to the script. Without an agent,
#   `paceline_decide_without_agent` decides. The shell writes `requeue-failed` if it cannot obey. The exit codes of srun
#   and mpirun arrive garbled and are not used.
#
# The user's variables and `setup` lines run in this shell, too. So every function, and every variable that outlives a
# function, begins with `paceline_`; Slurm's variables are read before those lines run; and no command here may fail
# unhandled, because the lines may run `set -euo pipefail`.

# The commands that this file calls, except Slurm's own, which users may wrap on purpose. Aliases of the user would
# change them while bash reads the functions below.
paceline_commands=(cat date echo env grep kill ln mkdir mv od paste readlink rm rmdir sed sleep sort tac tail timeout tr
    uname)
unalias "${paceline_commands[@]}" 2>/dev/null || :

paceline_fail() {
    echo "paceline: error: $*" >&2
    exit 1
}

paceline_say_how_to_submit() { # why, and the arguments of sbatch
    echo "paceline: error: $1 Submit it: sbatch ${*:2}" >&2
    exit 2
}

# -- one start of one job ------------------------------------------------------------------------------------

# Name this job and this start of it (a requeued job keeps its id), and read the options:
#   --no-requeue      the run may not go back into the queue; the agent knows it from launch.json
#   --exclude=NODES   nodes that the user excluded
paceline_identify_job() {
    paceline_clean_shell
    # A task of an array is ARRAY_TASK: its plain id may mean the whole array.
    paceline_job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
    paceline_job=${paceline_job:-$SLURM_JOB_ID}
    paceline_job_number=$SLURM_JOB_ID
    paceline_restarts=${SLURM_RESTART_COUNT:-0}
    paceline_task=${SLURM_ARRAY_TASK_ID:-}
    paceline_job_start="$paceline_job-$paceline_restarts"
    paceline_path=$PATH
    paceline_host=$(uname -n)
    paceline_terminated=''
    paceline_interrupted=''
    paceline_mpirun_pid=''
    paceline_exit=0
    paceline_requeue=1
    paceline_exclude=''
    local option
    for option in "$@"; do
        case $option in
            --no-requeue) paceline_requeue='' ;;
            --exclude=*) paceline_exclude=${option#*=} ;;
        esac
    done
}

# Some clusters do not allow requeueing, whatever the script requests, and others have no scontrol on their nodes.
# There, a new job continues the run.
paceline_ask_slurm() {
    paceline_resubmit=''
    paceline_queued_at=''
    [ -n "$paceline_requeue" ] || return 0
    if ! command -v scontrol >/dev/null; then
        paceline_resubmit=no-scontrol
        return 0
    fi
    local shown submitted
    shown=$(paceline_show_job "$paceline_job_number") || :
    if grep '^ *Requeue=0 Restarts=' <<<"$shown" >/dev/null; then paceline_resubmit=no-requeue; fi
    # Slurm updates this time when it requeues a job. After a node failure, no other source has it.
    submitted=$(grep -m 1 -o '^ *SubmitTime=[^ ]*' <<<"$shown") || return 0
    paceline_queued_at=$(date -d "${submitted#*=}" +%s 2>/dev/null) || :
}

paceline_show_job() { # ID
    SLURM_TIME_FORMAT=standard paceline_ask scontrol --all show job "$1" 2>/dev/null
}

# Ask Slurm with this command, with a time limit: signals are not handled until it returns.
paceline_ask() {
    if command -v timeout >/dev/null; then timeout -k 5 "${paceline_patience:-20}" "$@"; else "$@"; fi
}

# Undo what the user's start-up files, exported functions and lines may have changed in this shell: how it reads words,
# patterns and files, and what the commands of this script do, such as a `grep` that always prints colours.
paceline_clean_shell() {
    unset IFS GLOBIGNORE
    set +o noclobber +o noglob
    shopt -u failglob nullglob nocasematch
    unalias "${paceline_commands[@]}" 2>/dev/null || :
    unset -f "${paceline_commands[@]}" || : # one may be read-only
}

# Do the same after the user's lines have run. Also append this script's PATH to theirs, and restore the traps for
# Slurm's signals.
paceline_restore_shell() {
    paceline_clean_shell
    case ":$PATH:" in
        *":$paceline_path:"*) ;;
        *) PATH="$PATH:$paceline_path" ;;
    esac
    paceline_trap_signals
}

# Name this start by the job and its restart count, in a folder of names. A controller that crashes may forget that it
# has started a job, and start it again under the same count: that start gets a name of its own, such as 7-0_2.
paceline_name_job_start() { # FOLDER
    local number=1 name=$paceline_job_start
    mkdir -p "$1" || paceline_fail "Cannot write to $1 from $paceline_host. It must be on a shared file system."
    until mkdir "$1/$paceline_job_start" 2>/dev/null; do
        [ -d "$1/$paceline_job_start" ] || paceline_fail "Cannot write to $1 from $paceline_host."
        number=$((number + 1))
        paceline_job_start="${name}_$number"
    done
    export PACELINE_JOB_START="$paceline_job_start"
}

paceline_make_job_start_folder() {
    mkdir -p "$paceline_run/job-starts/$paceline_job_start" ||
        paceline_fail "Cannot write to $paceline_run from $paceline_host. It must be on a shared file system."
    # For the head agent, for the time line.
    [ -z "$paceline_queued_at" ] ||
        echo "$paceline_queued_at" >"$paceline_run/job-starts/$paceline_job_start/queued-at" || :
}

# Claim the run folder: two jobs must not train in the same one. claims/1, claims/2, ... are links that name job starts,
# and the last one has the run folder. Making a link is atomic, so exactly one of the job starts that find the last one
# over takes its place.
paceline_claim_run() {
    mkdir -p "$paceline_run/claims" || paceline_fail "Cannot write to $paceline_run from $paceline_host."
    while :; do
        paceline_find_owner
        [ "$paceline_owner" != "$paceline_job_start" ] || break
        # An earlier start of this job is over: Slurm has started it again.
        if [ -n "$paceline_owner" ] && [ "${paceline_owner%-*}" != "$paceline_job" ]; then
            paceline_is_over "$paceline_owner" || return 1
        fi
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

paceline_describe_owner() {
    case $paceline_owner in
        pid-*) echo "This run is running outside Slurm. If it has ended, remove" \
            "$paceline_run/job-starts/$paceline_owner/process." ;;
        *) echo "This run is already running as job ${paceline_owner%-*}." ;;
    esac
}

# squeue for all jobs, whatever SQUEUE_* variables the user has set: these are options, such as a partition.
paceline_squeue() {
    (
        unset "${!SQUEUE_@}" || :
        paceline_ask squeue --all --noheader "$@"
    )
}

# Whether another job start is over. If Slurm cannot tell, its head agent must have written a verdict.
paceline_is_over() {
    local pause state
    case $1 in
        pid-*) # it runs outside of Slurm
            paceline_has_verdict "$1" || [ ! -e "$paceline_run/job-starts/$1/process" ]
            return
            ;;
    esac
    for pause in 1 2 5 10 20; do
        command -v squeue >/dev/null || break
        # Read standard output alone: a site's warning on standard error is not a state.
        if state=$(paceline_squeue --jobs="${1%-*}" --format=%T 2>/dev/null); then
            case $state in
                RUNNING | SUSPENDED | STOPPED | RESIZING | SIGNALING | STAGE_OUT) return 1 ;;
                '' | PENDING | CONFIGURING | REQUEUED | REQUEUE_FED | REQUEUE_HOLD | RESV_DEL_HOLD) return 0 ;;
                COMPLETED | CANCELLED | FAILED | TIMEOUT | DEADLINE | PREEMPTED | OUT_OF_MEMORY) return 0 ;;
                NODE_FAIL | BOOT_FAIL | LAUNCH_FAILED | RECONFIG_FAIL | REVOKED | SPECIAL_EXIT) return 0 ;;
            esac
        else
            state=$(paceline_squeue --jobs="${1%-*}" --format=%T 2>&1 >/dev/null) || :
            case $state in *"Invalid job id"*) return 0 ;; esac
        fi
        ! paceline_has_verdict "$1" || return 0 # it is ending, or Slurm gives no answer that is known here
        sleep "$pause" || :
    done
    paceline_has_verdict "$1"
}

# Their EXIT trap stays.
paceline_trap_signals() { # [the function that creates the files `stop`]
    paceline_on_stop=${1:-$paceline_on_stop}
    trap 'paceline_interrupted=1; "$paceline_on_stop"' USR1
    trap paceline_terminate TERM
}

paceline_terminate() {
    paceline_interrupted=1
    paceline_terminated=1
    # mpirun's processes on this host belong to the batch step, which Slurm's own TERM does not reach.
    [ -z "$paceline_mpirun_pid" ] || kill -TERM "$paceline_mpirun_pid" || :
}

# Wait for a process, and set paceline_exit to its exit code. A trap interrupts `wait`, so wait again; the user's lines
# may have set one for any other signal.
paceline_await() {
    while :; do
        paceline_interrupted=''
        paceline_exit=0
        wait "$1" || paceline_exit=$?
        [ -n "$paceline_interrupted" ] || { [ "$paceline_exit" -gt 128 ] && kill -0 "$1" 2>/dev/null; } || break
    done
}

# Wait for srun or mpirun. It could wait until the time limit for a node that died and came back. So once the head agent
# has ended because another agent is gone, give it one more minute. `read` waits without a process.
paceline_await_agents() {
    local paceline_watcher
    (
        trap - USR1 TERM
        exec {paceline_never}<> <(:)
        until [ -e "$paceline_run/job-starts/$paceline_job_start/node-lost" ]; do
            kill -0 $$ || exit 0 # this job's shell was killed
            read -r -t "${paceline_poll:-5}" -u "$paceline_never" || :
        done
        for _ in {1..12}; do read -r -t "${paceline_poll:-5}" -u "$paceline_never" || :; done
        : >"$paceline_run/job-starts/$paceline_job_start/srun-killed"
        kill -KILL "$1"
    ) 2>/dev/null &
    paceline_watcher=$!
    paceline_await "$1"
    kill "$paceline_watcher" 2>/dev/null || :
    wait "$paceline_watcher" 2>/dev/null || :
}

# -- the agents ----------------------------------------------------------------------------------------------

# The rendezvous of the agents: this host, and a port that is different for every job, job start and trial. If the port
# is taken, the head agent chooses another and tells the others. The token keeps strangers out.
paceline_open_rendezvous() {
    paceline_restore_shell
    local port=$((20000 + (paceline_job_number * 31 + paceline_restarts * 7 + ${1:-0} * 13) % 12000))
    PACELINE_TOKEN=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
    export PACELINE_TOKEN PACELINE_RENDEZVOUS="$paceline_host:$port"
}

# mpirun passes only the variables that it is given by name to other nodes, and warns about those that are not set.
paceline_forward_variables() {
    local name
    paceline_forward=()
    for name in "$@"; do
        if [ -n "${!name+set}" ]; then paceline_forward+=(-x "$name"); fi
    done
}

# Write `paceline_inside`, the way into a container, to a file that every node can run. Not every script defines it.
paceline_share_container_entry() {
    declare -F paceline_inside >/dev/null || return 0
    { declare -f paceline_inside && echo 'paceline_inside "$@"'; } \
        >"$paceline_run/job-starts/$paceline_job_start/inside.sh" || paceline_fail "Cannot write to $paceline_run."
}

# Start the agents and wait for them, again if one of them was killed. All work on the nodes happens in this one
# step: after a cancel, a preemption or the time limit Slurm refuses to start another.
#
# srun kills the head agent if it cannot reach another node. That node may be back soon; if it is dead, Slurm notices
# within minutes (SlurmdTimeout) and requeues the job. The pauses add up to six minutes.
paceline_launch() {
    paceline_restore_shell
    if [ -n "$paceline_terminated" ]; then
        echo "paceline: job $paceline_job was ended before its agents started"
        return 0
    fi
    local number=0 starts=0 saved
    paceline_share_container_entry
    # The head agent allows the restarts that the user wants. These starts may fail before there is a head agent.
    while [ "$number" -lt 20 ]; do
        number=$((number + 1))
        starts=$((starts + 1))
        saved=$(paceline_list_checkpoints)
        if [ "$1" = mpirun ]; then
            SLURM_EXPORT_ENV=ALL OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 "$@" </dev/null &
            paceline_mpirun_pid=$!
        else
            "$@" </dev/null &
        fi
        paceline_await_agents $!
        paceline_mpirun_pid=''
        if paceline_srun_hung; then
            echo "paceline: job $paceline_job: srun waited for a node that is not responding"
            paceline_decide_without_agent srun-hung
            break
        fi
        paceline_agent_was_killed "$number" || break
        [ "$(paceline_list_checkpoints)" = "$saved" ] || number=1 # the run got further, so count from the start again
        echo "paceline: job $paceline_job: an agent was killed; starting the agents again"
        paceline_pause $((number < 16 ? 2 * number - 2 : 30))
        [ -z "$paceline_terminated" ] || break
        rm -f "$paceline_run/job-starts/$paceline_job_start"/{head,node-lost,join-error-*} || :
        [ -z "${PACELINE_RENDEZVOUS-}" ] || paceline_open_rendezvous "$((starts * 101))"
    done
}

paceline_list_checkpoints() { echo "$paceline_run"/checkpoints/*/complete.json; }

# Wait this many seconds. A signal ends the pause.
paceline_pause() {
    sleep "$1" &
    wait $! || :
}

# Whether the head agent began and left no verdict, although nobody ended the job: the out-of-memory killer ended it, it
# found that another agent was killed, or srun ended it, before all agents had met, because it cannot reach a node. If
# it was killed before it could leave a sign, only the exit code says so, which may also be another agent's: try three
# times.
paceline_agent_was_killed() { # NUMBER of starts
    local folder="$paceline_run/job-starts/$paceline_job_start"
    paceline_has_no_verdict || return 1
    [ -e "$folder/agent" ] || [ -e "$folder/head" ] || { [ "$paceline_exit" = 137 ] && [ "$1" -le 3 ]; }
}

# Whether srun was killed, because it waited for a node after the head agent had gone to let all agents start again.
paceline_srun_hung() {
    [ -e "$paceline_run/job-starts/$paceline_job_start/srun-killed" ] && paceline_has_no_verdict
}

# Whether the agents have left no verdict, although nobody ended the job.
paceline_has_no_verdict() {
    [ -z "$paceline_terminated" ] && [ ! -e "$paceline_run/cancelled" ] &&
        ! paceline_has_verdict "$paceline_job_start"
}

paceline_read_verdict() {
    paceline_verdict=$(paceline_verdict_of "$paceline_job_start" || echo failed)
}

# A file that is empty or truncated, because the disk was full, is not a verdict.
paceline_verdict_of() { # JOB_START
    local verdict
    verdict=$(cat "$paceline_run/job-starts/$1/verdict" 2>/dev/null) || :
    case $verdict in done | stopped | failed) echo "$verdict" ;; *) return 1 ;; esac
}

paceline_has_verdict() { paceline_verdict_of "$1" >/dev/null; } # JOB_START

# -- secrets -------------------------------------------------------------------------------------------------

# Once nothing needs them any more, keep only the names of the secrets in an environment file.
paceline_forget_secrets() { # FILE
    local mark='# Secrets until the run is over:' names
    names=$(grep -m 1 "^$mark" "$1" 2>/dev/null) || return 0
    (
        umask 077
        { sed "/^$mark/,\$d" "$1" && echo "paceline_require_secrets${names#"$mark"}"; } >"$1.new" && mv -f "$1.new" "$1"
    ) || rm -f "$1.new" || :
}

# A start after that takes them from the shell that submits the job.
paceline_require_secrets() { # NAME...
    local name
    for name in "$@"; do
        [ -n "${!name+set}" ] ||
            paceline_fail "The value of $name was removed when this run ended. Export $name, and submit the job again."
    done
}

# Whether no later start will need the secrets. A job that was ended from outside may be requeued by Slurm.
paceline_needs_no_secrets() {
    [ ! -e "$paceline_run/cancelled" ] || return 0
    [ -z "$paceline_terminated" ] && [ "$paceline_verdict" != stopped ] && ! paceline_wants_requeue &&
        paceline_has_verdict "$paceline_job_start"
}

# Whether all trials of the submission have ended for good, once all of its arrays are in the queue.
paceline_is_submission_over() {
    local _ trials trial
    [ -e "$paceline_submission/submitted" ] || return 1
    while read -r _ trials; do
        for trial in $trials; do
            [ -e "$paceline_sweep/trials/$trial/result.json" ] || [ -e "$paceline_sweep/trials/$trial/cancelled" ] ||
                [ -e "$paceline_sweep/cancelled" ] || return 1
        done
    done < <(tac "$paceline_submission"/tasks-*) # the last ones are the last to end
}

# -- requeue -----------------------------------------------------------------------------------------------------

# Whether the head agent wants a requeue. It writes the verdict last: without one, it did not get to the end.
paceline_wants_requeue() {
    [ -e "$paceline_run/job-starts/$paceline_job_start/requeue" ] && paceline_has_verdict "$paceline_job_start"
}

# Whether to obey: Slurm itself requeues a job that it preempts, and a cancelled run stays cancelled.
paceline_may_requeue() {
    [ -n "$paceline_requeue" ] && paceline_wants_requeue && [ -z "$paceline_terminated" ] && [ ! -e "$paceline_run/cancelled" ]
}

# Decide in place of the head agent whether this run goes on in a later start. This shell must, because no agent can:
#   srun-hung    the agents have gone to start again, but the step of the dead srun keeps their cores until Slurm
#                notices what became of the node
#   not-begun    a trial whose agents no longer start, because the task is stopping
#   not-opened   a trial that Paceline could not prepare, so it has no agents
#   terminated   a trial whose agents may have been killed with the job before they could save: returns whether Slurm
#                may requeue the job
paceline_decide_without_agent() {
    local folder="$paceline_run/job-starts/$paceline_job_start" verdict=stopped requeue=$paceline_requeue
    case $1 in
        srun-hung) [ -n "$requeue" ] || verdict=failed ;;
        not-opened) verdict=failed requeue='' ;;
        terminated)
            [ -n "$requeue" ]
            return
            ;;
    esac
    [ -z "$requeue" ] || : >"$folder/requeue" || :
    echo "$verdict" >"$folder/verdict" || :
}

# The nodes to exclude, as the head agents wrote them into these files. The list replaces the user's own, so add that.
paceline_excluded_nodes() {
    local nodes
    nodes=$(cat "$@" 2>/dev/null | grep . | sort -u | paste -sd, -) || :
    echo "${nodes:+${paceline_exclude:+$paceline_exclude,}$nodes}"
}

# Requeue this job or, if that is not possible, submit one that continues the run; paceline_next is its id. If neither
# works, files named `requeue-failed` in the given folders say why, and a person must act.
paceline_return_to_queue() { # NODES to exclude, the number of folders, the folders, then the script and its arguments
    local nodes=$1 folders=("${@:3:$2}") folder
    shift $((2 + $2))
    trap '' TERM # a requeue ends this shell with TERM, and there is more to do before that
    paceline_next=''
    paceline_problem=''
    [ -n "$paceline_resubmit" ] || paceline_requeue_job "$nodes"
    [ -z "$paceline_resubmit" ] || paceline_submit_next ${nodes:+"--exclude=$nodes"} "$@"
    [ -n "$paceline_problem" ] || return 0
    echo "paceline: error: Cannot requeue this run: $paceline_problem" >&2
    for folder in "${folders[@]}"; do echo "$paceline_problem" >"$folder/requeue-failed" || :; done
}

paceline_requeue_job() { # NODES, to exclude. Afterwards paceline_problem says why not, in one line
    local pause
    # The controller may be unreachable for a moment (a restart, a failover), so ask more than once.
    for pause in 2 5 10 20 0; do
        if paceline_problem=$(scontrol requeue "$paceline_job" 2>&1); then
            paceline_problem=''
        else
            paceline_problem=$(paceline_one_line "${paceline_problem:-scontrol failed}")
            echo "paceline: $paceline_problem" >&2
        fi
        case $paceline_problem in
            '' | *"pending execution"*) # or Slurm has requeued it already: it is being preempted, or has not answered
                paceline_problem=''
                # Slurm does not exclude nodes from a running job; a requeued one is pending.
                [ -z "$1" ] || scontrol update jobid="$paceline_job" ExcNodeList="$1" || :
                paceline_await_requeue "$1"
                return 0
                ;;
            *[Dd]enied* | *disabled* | *"not supported"* | *"not permitted"*) # and another try would change nothing
                paceline_resubmit=refused
                return 0
                ;;
        esac
        sleep "$pause" || :
    done
}

# Wait until Slurm ends this shell. A controller that crashes just after it has accepted a requeue may forget it: the
# job is running then.
paceline_await_requeue() { # NODES, to exclude
    local pause
    for pause in 1 2 3 4 10 20 20; do
        sleep "$pause" || :
        paceline_show_job "$paceline_job" | grep '^ *JobState=RUNNING' >/dev/null || continue
        echo "paceline: job $paceline_job: Slurm has forgotten the requeue; requesting it again"
        scontrol requeue "$paceline_job" || : # it may have worked all the same
        [ -z "$1" ] || scontrol update jobid="$paceline_job" ExcNodeList="$1" || :
    done
}

paceline_one_line() { tr -s '\n' ' ' <<<"$1"; }

# Submit a job that continues once this one is gone. It inherits nothing but the user's defaults. Other users can read
# the command line of `env`, so the token is not on it.
paceline_submit_next() {
    local name kept=() id
    paceline_next=''
    if ! command -v sbatch >/dev/null; then
        paceline_problem="$paceline_host has neither scontrol nor sbatch"
        return 0
    fi
    for name in HOME USER LOGNAME SHELL LANG LC_ALL PATH TZ KRB5CCNAME SLURM_CONF SLURM_CLUSTERS "${!SBATCH_@}"; do
        if [ -n "${!name+set}" ]; then kept+=("$name=${!name}"); fi
    done
    # shellcheck disable=SC2016 # the inner shell expands it
    if id=$(env -i "${kept[@]}" "$BASH" -c 'read -r token; [ -z "$token" ] || export SLURM_JWT=$token
        exec sbatch --parsable "$@" </dev/null' - --dependency="afterany:$paceline_job" "$@" 2>&1 <<<"${SLURM_JWT:-}"); then
        # A site's wrapper around sbatch may print more than the id.
        id=$(grep -Eo '^[0-9]+(;|$)' <<<"$id" | tail -n 1) || :
        paceline_next=${id%;}
        paceline_problem=''
        return 0
    fi
    paceline_problem=$(paceline_one_line "${id:-sbatch failed}")
    # A slow controller may have accepted the job anyway; if so, a pending job depends on this one.
    case $paceline_problem in *"timed out"* | *"receive failure"* | *"send failure"*) ;; *) return 0 ;; esac
    for name in 5 15 30; do
        sleep "$name" || :
        id=$(paceline_squeue --me --states=PENDING --format='%F %E' 2>/dev/null |
            grep -E " afterany:$paceline_job(\(|$)" | tail -n 1) || :
        if [ -n "$id" ]; then
            paceline_next=${id%% *}
            paceline_problem=''
            return 0
        fi
    done
}

# -- a single run: job.sbatch sets `paceline_run` ------------------------------------------------------------

paceline_start_job() { # [--no-requeue] [--exclude=NODES]
    [ -n "${SLURM_JOB_ID:-}" ] || paceline_say_how_to_submit "This is a batch script for Slurm." "$0"
    paceline_identify_job "$@"
    paceline_name_job_start "$paceline_run/job-starts"
    paceline_trap_signals paceline_stop_run # Slurm may keep this script waiting from here on
    paceline_ask_slurm
    if paceline_was_done; then
        paceline_withdraw_job_start
        echo "paceline: job $paceline_job: already done"
        exit 0
    fi
    if [ -e "$paceline_run/cancelled" ]; then
        paceline_withdraw_job_start
        paceline_fail "This run was cancelled. To continue it: paceline submit --resume ${paceline_run##*/}"
    fi
    if ! paceline_claim_run; then
        paceline_withdraw_job_start
        paceline_fail "$(paceline_describe_owner)"
    fi
    paceline_make_job_start_folder
    export PACELINE_RUN="$paceline_run"
}

# Whether the last start of this job was done. Newer versions of Slurm requeue a preempted job even if it has finished
# in the meantime. At its first start, a crashed controller has forgotten that start, or Slurm has begun its job ids
# anew: then this job was submitted after that verdict.
paceline_was_done() {
    local ended
    paceline_find_owner
    [ "${paceline_owner%-*}" = "$paceline_job" ] && [ "$(paceline_verdict_of "$paceline_owner")" = "done" ] || return 1
    [ "$paceline_restarts" = 0 ] || return 0
    ended=$(date -r "$paceline_run/job-starts/$paceline_owner/verdict" +%s 2>/dev/null) || return 1
    [ -n "$paceline_queued_at" ] && [ "$paceline_queued_at" -le "$ended" ]
}

paceline_withdraw_job_start() { # nothing starts here
    rm -f "$paceline_run/job-starts/$paceline_job_start/stop" || :
    rmdir "$paceline_run/job-starts/$paceline_job_start" || :
}

paceline_stop_run() { : >"$paceline_run/job-starts/$paceline_job_start/stop" || :; }

paceline_finish_job() {
    local nodes folder="$paceline_run/job-starts/$paceline_job_start"
    paceline_restore_shell
    paceline_read_verdict
    echo "paceline: job $paceline_job: $paceline_verdict"
    if paceline_has_no_verdict; then
        echo "the agents ended without a verdict; $paceline_run/slurm.log says why" >"$folder/requeue-failed" || :
    fi
    if paceline_may_requeue; then
        nodes=$(paceline_excluded_nodes "$folder/requeue")
        paceline_return_to_queue "$nodes" 1 "$folder" "$paceline_run/job.sbatch"
        [ -z "$paceline_next" ] || echo "$paceline_next" >"$paceline_run/job" || :
    fi
    if paceline_needs_no_secrets; then paceline_forget_secrets "$paceline_run/environment.sh"; fi
    # A run whose last state could not be saved is done, but what depends on it must not start.
    [ ! -e "$folder/unsaved" ] || [ "$paceline_verdict" != "done" ] || exit 1
    case $paceline_verdict in done) exit 0 ;; stopped) exit 75 ;; *) exit 1 ;; esac
}

# -- a task of a sweep: job.sbatch defines `paceline_launch_trial`, and `paceline_run_half` (Paceline on this host) --

paceline_start_task() { # SWEEP SUBMISSION LIST [--no-requeue] [--exclude=NODES]
    paceline_sweep=$1
    paceline_submission=$2
    paceline_list=$3
    [ -n "${SLURM_ARRAY_TASK_ID:-}" ] || paceline_say_how_to_submit "This is the batch script of an array." \
        "--array=$(paceline_list_tasks)" "$paceline_submission/job.sbatch" "$paceline_list"
    paceline_identify_job "${@:4}"
    [ ! -e "$paceline_submission/cancelled-$paceline_list" ] ||
        paceline_fail "This array was cancelled: its submission was not confirmed."
    # The trials of this task are in its line of the list, after its index.
    local index line
    paceline_trials=()
    while read -r index line; do
        if [ "$index" = "$paceline_task" ]; then read -r -a paceline_trials <<<"$line"; fi
    done <"$paceline_submission/$paceline_list"
    [ ${#paceline_trials[@]} -gt 0 ] ||
        paceline_fail "$paceline_submission/$paceline_list has no trials for task $paceline_task."
    paceline_name_job_start "$paceline_submission/job-starts"
    paceline_trap_signals paceline_stop_trials # Slurm may keep this script waiting from here on
    paceline_ask_slurm
}

paceline_list_tasks() { # such as 0-3,7
    local index last='' found=''
    while read -r index _; do
        if [ -n "$last" ] && [ "$index" = $((last + 1)) ]; then
            found="${found%"-$last"}-$index"
        else
            found="$found${found:+,}$index"
        fi
        last=$index
    done <"$paceline_submission/$paceline_list"
    echo "$found"
}

paceline_stop_trials() {
    local trial folder
    for trial in "${paceline_trials[@]}"; do
        folder="$paceline_sweep/trials/$trial"
        [ ! -e "$folder/result.json" ] || continue
        { mkdir -p "$folder/job-starts/$paceline_job_start" && : >"$folder/job-starts/$paceline_job_start/stop"; } || :
    done
}

# Run the trials of this task, one after the other or in this many parallel slots. A local variable would hide the
# user's, even in the trials, so local variables have the prefix, too.
paceline_run_trials() {
    local paceline_slot paceline_slots=() paceline_index
    paceline_restore_shell
    if [ "$1" = 1 ]; then
        for paceline_trial in "${paceline_trials[@]}"; do paceline_run_trial "$paceline_trial"; done
        return 0
    fi
    for ((paceline_slot = 0; paceline_slot < $1; paceline_slot++)); do
        (
            paceline_trap_signals : # the task's own shell creates the files `stop`
            for ((paceline_index = paceline_slot; paceline_index < ${#paceline_trials[@]}; paceline_index += $1)); do
                paceline_run_trial "${paceline_trials[paceline_index]}"
            done
        ) &
        paceline_slots+=("$!")
    done
    for paceline_slot in "${paceline_slots[@]}"; do paceline_await "$paceline_slot"; done
}

# One trial is a run with its own folder. Trials that have a result or are cancelled are skipped.
paceline_run_trial() {
    paceline_trial=$1
    paceline_run="$paceline_sweep/trials/$1"
    [ ! -e "$paceline_sweep/cancelled" ] || return 0
    if [ -e "$paceline_run/cancelled" ] || [ -e "$paceline_run/result.json" ]; then return 0; fi
    paceline_make_job_start_folder
    export PACELINE_RUN="$paceline_run"
    paceline_open_and_run_trial >>"$paceline_run/slurm.log" 2>&1 || : # the next trial runs in any case
}

paceline_open_and_run_trial() {
    if ! paceline_claim_run; then
        echo "paceline: trial $paceline_trial: $(paceline_describe_owner)"
        return
    fi
    [ -z "$paceline_terminated" ] || return
    if [ -e "$paceline_run/job-starts/$paceline_job_start/stop" ]; then
        paceline_decide_without_agent not-begun
        return
    fi
    paceline_share_container_entry
    if ! paceline_run_half trial open "$paceline_sweep" "$paceline_submission" "$paceline_trial"; then
        # A result means that the search has no points left.
        if [ -n "$paceline_terminated" ] || [ -e "$paceline_run/result.json" ]; then return; fi
        paceline_decide_without_agent not-opened
        paceline_run_half trial close "$paceline_sweep" "$paceline_trial" failed
        return
    fi
    paceline_launch_trial
    paceline_read_verdict
    echo "paceline: job $paceline_job: trial $paceline_trial: $paceline_verdict"
    # A trial that goes on in a later start has no result yet.
    if paceline_wants_requeue; then return; fi
    if [ "$paceline_verdict" = failed ] && [ -n "$paceline_terminated" ] &&
        paceline_decide_without_agent terminated; then return; fi
    paceline_run_half trial close "$paceline_sweep" "$paceline_trial" "$paceline_verdict"
}

paceline_finish_task() {
    local code=0 files=() folders=() nodes log="$paceline_submission/logs/$paceline_job.log"
    paceline_restore_shell
    # The task is done if all its trials are, and failed if one of them is.
    for paceline_trial in "${paceline_trials[@]}"; do
        paceline_run="$paceline_sweep/trials/$paceline_trial"
        files+=("$paceline_run"/job-starts/*/requeue)
        case $(paceline_verdict_of "$paceline_job_start") in
            failed) code=1 ;;
            stopped) [ "$code" = 1 ] || code=75 ;;
        esac
        if paceline_may_requeue; then folders+=("$paceline_run/job-starts/$paceline_job_start"); fi
    done
    [ -s "$log" ] || rm -f "$log" || :
    if [ ${#folders[@]} -gt 0 ] && [ ! -e "$paceline_sweep/cancelled" ]; then
        nodes=$(paceline_excluded_nodes "${files[@]}")
        paceline_return_to_queue "$nodes" "${#folders[@]}" "${folders[@]}" --array="$paceline_task" \
            "$paceline_submission/job.sbatch" "$paceline_list"
        for paceline_trial in "${paceline_trials[@]}"; do
            [ -z "$paceline_next" ] || [ -e "$paceline_sweep/trials/$paceline_trial/result.json" ] ||
                echo "${paceline_next}_$paceline_task" >"$paceline_sweep/trials/$paceline_trial/job" || :
        done
    fi
    if paceline_is_submission_over; then paceline_forget_secrets "$paceline_submission/environment.sh"; fi
    exit "$code"
}
