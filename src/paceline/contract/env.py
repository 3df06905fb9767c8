"""Names of the environment variables that Paceline sets and reads."""

from __future__ import annotations

RUN = "PACELINE_RUN"  # the run folder
ATTEMPT = "PACELINE_ATTEMPT"  # which attempt this is, from 1
JOB_START = "PACELINE_JOB_START"  # one start of the job: job id and restart count on Slurm, process id locally
RENDEZVOUS = "PACELINE_RENDEZVOUS"  # host:port of the head agent; not set if there is one agent
TOKEN = "PACELINE_TOKEN"  # the secret with which agents prove that they belong to the run
AGENT = "PACELINE_AGENT"  # "index/count" if no scheduler numbers the agents
HEARTBEAT = "PACELINE_HEARTBEAT"  # the heartbeat file of this node
ZYGOTE = "PACELINE_ZYGOTE"  # the socket of a zygote that started before its agent
DATA = "PACELINE_DATA"  # node-local data folder
POLL_INTERVAL = "PACELINE_POLL_INTERVAL"  # seconds for which an answer of the scheduler counts
ON_CLUSTER = "PACELINE_ON_CLUSTER"  # on a login node: the cluster that `--on` named where the command was typed
LAPTOP_FOLDER = "PACELINE_LAPTOP_FOLDER"  # there, too: the project's folder where the command was typed
SENT_FOLDER = "PACELINE_SENT_FOLDER"  # and its copy on the login node
PROBE = "PACELINE_PROBE"  # what `paceline prove` asks ranks to record: the file of a `ProofSpec`

# Paths and names for scripts that do not use the runtime.
SOURCE_DIR = "PACELINE_SOURCE_DIR"  # the code that the ranks run
PROJECT = "PACELINE_PROJECT"
SCRATCH_DIR = "PACELINE_SCRATCH_DIR"
EXPERIMENT = "PACELINE_EXPERIMENT"
CHECKPOINTS = "PACELINE_CHECKPOINTS"  # the run's checkpoint folder
LOGS = "PACELINE_LOGS"  # the attempt's folder

# The variables that torchrun sets; every launch style sets them too.
RANK = "RANK"
LOCAL_RANK = "LOCAL_RANK"
WORLD_SIZE = "WORLD_SIZE"
LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"
GROUP_RANK = "GROUP_RANK"
GROUP_WORLD_SIZE = "GROUP_WORLD_SIZE"
MASTER_ADDR = "MASTER_ADDR"
MASTER_PORT = "MASTER_PORT"
RUN_ID = "TORCHELASTIC_RUN_ID"
RESTART_COUNT = "TORCHELASTIC_RESTART_COUNT"
MAX_RESTARTS = "TORCHELASTIC_MAX_RESTARTS"
USE_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
ROLE_RANK = "ROLE_RANK"
ROLE_WORLD_SIZE = "ROLE_WORLD_SIZE"
ROLE_NAME = "ROLE_NAME"

NODE_RANK = "NODE_RANK"  # not set, but frameworks read it: one value for all nodes would mislead them

_LAUNCHER_VARIABLES = frozenset({
    RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, GROUP_RANK, GROUP_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, RUN_ID,
    RESTART_COUNT, MAX_RESTARTS, USE_AGENT_STORE, ROLE_RANK, ROLE_WORLD_SIZE, ROLE_NAME, NODE_RANK,
})  # fmt: skip

MAX_BYTES = 131_000  # of one variable: Linux starts no process with more than 128 KiB in one

_USER_VARIABLES = frozenset({"PACELINE_SCRATCH", "PACELINE_SANDBOX", POLL_INTERVAL})  # settings of the command line


def is_too_large(name: str, value: str) -> bool:
    """Return whether no process can be started with this variable."""
    return len(name) + len(value.encode(errors="surrogateescape")) > MAX_BYTES


def is_owned(name: str) -> bool:
    """Return whether this variable is the launcher's, so that a user's value would have no effect or mislead."""
    return name in _LAUNCHER_VARIABLES or (name.startswith("PACELINE_") and name not in _USER_VARIABLES)
