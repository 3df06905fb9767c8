"""Names of the environment variables that Paceline sets and reads: the one table of them."""

from __future__ import annotations

# What the agent and its ranks know about their run.
RUN = "PACELINE_RUN"  # the run folder
ATTEMPT = "PACELINE_ATTEMPT"  # which attempt this is, from 1
# one start of the job: job id and restart count on Slurm, process id locally
JOB_START = "PACELINE_JOB_START"
RENDEZVOUS = "PACELINE_RENDEZVOUS"  # host:port of the head agent; not set if there is one agent
TOKEN = "PACELINE_TOKEN"  # the secret with which agents prove that they belong to the run
AGENT = "PACELINE_AGENT"  # "index/count" if no scheduler numbers the agents
HEARTBEAT = "PACELINE_HEARTBEAT"  # the heartbeat file of this node
ZYGOTE = "PACELINE_ZYGOTE"  # socket and process of a zygote that started before its agent
DATA = "PACELINE_DATA"  # node-local data folder
# torchrun's ranks: the pipes that the agent reads, by local rank
OUTPUT_PIPES = "PACELINE_OUTPUT_PIPES"
PARENT = "PACELINE_PARENT"  # exec'd ranks: the process that they must not outlive
# set by `paceline.spawn` in its children, besides torchrun's variables
SPAWNED = "PACELINE_SPAWNED"
PROOF = "PACELINE_PROOF"  # what `paceline prove` asks ranks to record: the file of a `ProofSpec`
# what `paceline inspect data` asks ranks to record: the steps of each epoch, and the folder
SAMPLES = "PACELINE_SAMPLES"
# the folder where ranks write what the fitness check measures; not set: they print it
FITNESS = "PACELINE_FITNESS"
FITNESS_CPU = "PACELINE_FITNESS_CPU"  # "1": the fitness check measures CPUs, even if there are GPUs

# Settings of the command line.
SCRATCH = "PACELINE_SCRATCH"  # the folder for run folders; also for scripts that no agent started
PROFILE = "PACELINE_PROFILE"  # the default of --cluster-profile, e.g. set in your shell's rc file
ON = "PACELINE_ON"  # the default of --on
SANDBOX = "PACELINE_SANDBOX"  # the folder of the sandbox
POLL_INTERVAL = "PACELINE_POLL_INTERVAL"  # seconds for which an answer of the scheduler counts

# On a login node, of a command that was typed elsewhere.
ON_CLUSTER = "PACELINE_ON_CLUSTER"  # the cluster that `--on` named there
LAPTOP_FOLDER = "PACELINE_LAPTOP_FOLDER"  # the project's folder there
SENT_FOLDER = "PACELINE_SENT_FOLDER"  # and its copy on the login node
RECEIVED = "PACELINE_RECEIVED"  # the file with the secrets that came along
REQUEST = "PACELINE_REQUEST"  # the id of a submission, which the run's record has
REPEATED = "PACELINE_REPEATED"  # set if the answer to the same submission was lost earlier

# Of shells that run the lines of a job's script without the job. Lines travel in a variable: there
# may be no file that all nodes see, and they may hold secrets, which an argument would show.
SHELL_SETUP = "PACELINE_SHELL_SETUP"  # the lines, for a shell in an allocation
# set while lines of `setup` are only probed: one that must not run here can check for it
CHECK = "PACELINE_CHECK"

# begins the variables of a notification's command: ..._EVENT, _RUN_ID, _STATUS and _TEXT
NOTIFY = "PACELINE_NOTIFY_"

# Paths and names for scripts that do not use the runtime.
SOURCE_DIR = "PACELINE_SOURCE_DIR"  # the code that the ranks run
PROJECT = "PACELINE_PROJECT"
SCRATCH_DIR = "PACELINE_SCRATCH_DIR"
EXPERIMENT = "PACELINE_EXPERIMENT"
CHECKPOINTS = "PACELINE_CHECKPOINTS"  # the run's checkpoint folder
LOGS = "PACELINE_LOGS"  # the attempt's folder

# What torchrun sets, and every launch style too.
_LAUNCHER_VARIABLES = frozenset(
    {
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_RESTART_COUNT",
        "TORCHELASTIC_MAX_RESTARTS",
        "TORCHELASTIC_USE_AGENT_STORE",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
        "ROLE_NAME",
        "NODE_RANK",  # not set, but frameworks read it: one value for all nodes would mislead
    }
)

_USER_VARIABLES = frozenset({SCRATCH, SANDBOX, POLL_INTERVAL})  # settings of the command line


def is_owned(name: str) -> bool:
    """Return whether this variable is the launcher's, so that a user's value would have no effect
    or mislead.
    """
    return name in _LAUNCHER_VARIABLES or (
        name.startswith("PACELINE_") and name not in _USER_VARIABLES
    )
