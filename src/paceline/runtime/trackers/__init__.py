"""Where a run's metrics go besides `metrics.jsonl`: W&B, TensorBoard, and trackers of your own.

base          `[tracking]`, `RunInfo`, and `Tracker`, the three methods to implement
selection     from those settings to the trackers of this rank; a missing package costs one warning
thread        the thread that passes lines of `metrics.jsonl` to a tracker while the script trains
tensorboard   event files in the run folder
wandb_run     the W&B run of a Paceline run
wandb_points  points of a W&B sweep
wandb_module  what `paceline.wandb` is made of; `wandb_noop` is for ranks without a run

Nothing here imports torch, wandb or tensorboard until a tracker needs it.
"""
