"""Names of the environment variables that Paceline sets and reads."""

from __future__ import annotations

RUN = "PACELINE_RUN"  # the run folder
ATTEMPT = "PACELINE_ATTEMPT"  # which attempt this is, from 1
JOB_START = "PACELINE_JOB_START"  # one start of a job: job id and restart count on Slurm, process id here
RENDEZVOUS = "PACELINE_RENDEZVOUS"  # host:port where the agents of a run meet; absent when there is one agent
TOKEN = "PACELINE_TOKEN"  # the secret that a agent shows when it joins
AGENT = "PACELINE_AGENT"  # "index/count" where no scheduler numbers the agents (several nodes here)
HEARTBEAT = "PACELINE_HEARTBEAT"  # the beat file of this node, made by its agent
ZYGOTE = "PACELINE_ZYGOTE"  # the descriptor of a zygote that was started ahead of its agent
DATA = "PACELINE_DATA"  # node-local data folder

# Where things are, for scripts that do not use the runtime.
SOURCE_DIR = "PACELINE_SOURCE_DIR"  # the project's code, as the ranks run it
PROJECT = "PACELINE_PROJECT"
SCRATCH_DIR = "PACELINE_SCRATCH_DIR"
EXPERIMENT = "PACELINE_EXPERIMENT"
CHECKPOINTS = "PACELINE_CHECKPOINTS"  # the run's folder for them
LOGS = "PACELINE_LOGS"  # the attempt's folder

# What torchrun gives a script, and so what every launch style gives it.
RANK = "RANK"
LOCAL_RANK = "LOCAL_RANK"
WORLD_SIZE = "WORLD_SIZE"
LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"
GROUP_RANK = "GROUP_RANK"
GROUP_WORLD_SIZE = "GROUP_WORLD_SIZE"
MASTER_ADDR = "MASTER_ADDR"
MASTER_PORT = "MASTER_PORT"
RUN_ID = "TORCHELASTIC_RUN_ID"
