"""Where the numbers of a run go besides `metrics.jsonl`: W&B, TensorBoard, and whatever has three methods.

tracking    what was asked for in `[tracking]` and by flags, and what a tracker is told of its run
choosing    from that to the trackers of this rank; a package that is missing costs one warning
feed        a thread that hands lines of `metrics.jsonl` to trackers, beside the training
connection  whether W&B can be reached: its key, its host
service     the process that wandb starts: found, ended when it hangs
wandb_run, tensorboard    the two that are built in
wandb_kept, wandb_completing    what W&B has on disk, made whole from metrics.jsonl after a kill
standin     what `paceline.wandb` is made of; nothing: objects that do nothing, for ranks without a run
channel     words from rank 0 to all ranks, also outside of a session
wandb_agent points of a W&B sweep

Nothing here imports torch, wandb or tensorboard until a tracker that needs it is on.
"""
