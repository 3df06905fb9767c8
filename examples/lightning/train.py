"""Lightning's Trainer, without any Paceline code: it saves when it is asked to stop, and it
resumes.

python train.py                                    one process, as usual
paceline run --cpu --nproc 2 train.py              two ranks
paceline submit --nodes 2 --gpus 4 train.py        eight ranks on a Slurm cluster

When the run must stop, Paceline sends SIGTERM, which the Trainer handles: it raises an exception
after the step. The checkpoint callback saves on exceptions, and `ckpt_path="last"` loads that
checkpoint at the next start.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from points import ResumableLoader, network, spirals
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Arms(lightning.LightningModule):
    def __init__(self, lr: float) -> None:
        super().__init__()
        self.lr, self.net = lr, network()

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        points, arms = batch
        return F.cross_entropy(self.net(points), arms)

    def test_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        points, arms = batch
        self.log(
            "accuracy", (self.net(points).argmax(dim=1) == arms).float().mean(), sync_dist=True
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)

    def on_train_start(self) -> None:
        if self.global_step:
            self.print(f"resumed at step {self.global_step}", flush=True)

    def on_train_epoch_end(self) -> None:
        self.print(f"epoch {self.current_epoch + 1}: step {self.global_step}", flush=True)


def loader(
    data: TensorDataset, trainer: lightning.Trainer, *, batch_size: int, train: bool
) -> DataLoader[Any]:
    sampler = DistributedSampler(
        data, trainer.world_size, trainer.global_rank, shuffle=train, seed=0, drop_last=train
    )
    if train:
        return ResumableLoader(data, batch_size, sampler=sampler, drop_last=True)
    return DataLoader(data, batch_size, sampler=sampler)


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Tell the arms of a spiral apart.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="samples per step and rank (32)")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--samples", type=int, default=6000)
    parser.add_argument("--cpu", action="store_true", help="ignore GPUs")
    # in the run folder, if Paceline started the ranks
    folder = os.environ.get("PACELINE_CHECKPOINTS", "checkpoints")
    parser.add_argument("--folder", type=Path, default=folder, help="where to save (%(default)s)")
    args = parser.parse_args(given)
    samples = args.samples // int(os.environ.get("WORLD_SIZE", "1"))
    if args.batch_size > samples:
        parser.error(f"--batch-size {args.batch_size} is more than the {samples} samples of a rank")
    return args


def main(given: Sequence[str] | None = None) -> float:
    args = arguments(given)
    lightning.seed_everything(0)
    save = ModelCheckpoint(
        args.folder, save_last=True, save_on_exception=True, enable_version_counter=False
    )
    trainer = lightning.Trainer(
        accelerator="auto" if torch.cuda.is_available() and not args.cpu else "cpu",
        # as many ranks per node and nodes as were started
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        strategy="ddp",
        use_distributed_sampler=False,
        max_epochs=args.epochs,
        callbacks=[save],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Arms(args.lr)
    train = loader(spirals(args.samples, seed=1), trainer, batch_size=args.batch_size, train=True)
    test = loader(spirals(1000, seed=2), trainer, batch_size=250, train=False)
    trainer.fit(model, train, ckpt_path="last")
    accuracy = trainer.test(model, test, verbose=False)[0]["accuracy"]
    if trainer.is_global_zero:
        print(f"final test accuracy: {accuracy:.2%}", flush=True)
    return accuracy


if __name__ == "__main__":
    main()
