"""Where a run's metrics go besides `metrics.jsonl`: W&B, TensorBoard, and trackers of your own.

base          `RunInfo`, and `Tracker`, the three methods to implement
threads       the trackers of this rank, each with a thread that passes it lines of `metrics.jsonl`
tensorboard   event files in the run folder
wandb_run     the W&B run of a Paceline run
wandb_points  points of a W&B sweep
wandb_module  what `paceline.wandb` is made of, with objects for ranks without a run
config        what `run.config` records

Nothing here imports torch, wandb or tensorboard until a tracker needs it.
"""
