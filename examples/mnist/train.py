"""Train on handwritten digits, with one process or many. The same script runs with each of these:

python train.py                                  one process
torchrun --nproc-per-node 2 train.py --cpu       two ranks
paceline run --nproc 2 --cpu train.py            two ranks, with logs, checkpoints and resume
paceline submit --nodes 2 --gpus 4 train.py      eight ranks on a Slurm cluster
"""

from __future__ import annotations

import argparse
from pathlib import Path

import digits
import torch
import torch.nn.functional as F
from torch import nn

import paceline


class Net(nn.Module):
    """Two convolutions and two dense layers, with 1,199,882 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.conv1(images))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = self.dropout1(x).flatten(1)
        x = self.dropout2(F.relu(self.fc1(x)))
        return self.fc2(x)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small network on MNIST.")
    parser.add_argument(
        "--batch-size", type=int, default=64, help="samples per step over all ranks (64)"
    )
    parser.add_argument(
        "--test-batch-size", type=int, default=1000, help="samples per test batch, likewise (1000)"
    )
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--lr", type=float, default=1.0, help="learning rate of Adadelta (1.0)")
    parser.add_argument(
        "--gamma", type=float, default=0.7, help="learning rate decay per epoch (0.7)"
    )
    parser.add_argument("--dry-run", action="store_true", help="run one step and one test")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cpu", action="store_true", help="ignore GPUs")
    parser.add_argument("--backend", help="process group backend, such as nccl or gloo (by device)")
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16", "fp16"])
    on_off = {"action": argparse.BooleanOptionalAction}
    parser.add_argument(
        "--resident", **on_off, help="keep the training set on the device (on a GPU)"
    )
    parser.add_argument("--capture", **on_off, help="run each step as one CUDA graph (on a GPU)")
    parser.add_argument(
        "--compile", action="store_true", help="compile the model; pays off in long runs"
    )
    parser.add_argument(
        "--data-dir",
        type=Path,
        help="folder with the full dataset as IDX files (the bundled subset)",
    )
    parser.add_argument(
        "--download", action="store_true", help="download the full dataset to --data-dir"
    )
    parser.add_argument(
        "--checkpoint-dir", type=Path, help="where to save checkpoints (the run folder)"
    )
    return parser.parse_args()


def test(
    run: paceline.Run, model: nn.Module, data: torch.utils.data.Dataset, batch_size: int
) -> float:
    """Return the accuracy on the whole test set."""
    model.eval()
    hits, seen = torch.zeros((), device=run.device), torch.zeros((), device=run.device)
    with torch.no_grad():
        for images, labels in run.evaluate(data, batch_size=batch_size):
            with run.autocast():
                guess = model(images).argmax(dim=1)
            hits += (guess == labels).sum()
            seen += len(labels)
    model.train()
    return float(run.sum(hits) / run.sum(seen))


def main() -> None:
    args = arguments()
    folder = args.data_dir or (Path("mnist-data") if args.download else digits.SUBSET)
    with paceline.session(
        seed=args.seed, cpu=args.cpu, backend=args.backend, precision=args.precision
    ) as run:
        if args.download:
            with run.rank_zero_first():
                digits.download(folder)
        train_set, test_set = digits.load(folder, "train"), digits.load(folder, "t10k")

        model = Net().to(memory_format=torch.channels_last)  # convolutions are faster this way
        model = run.wrap(model, compile=args.compile)
        optimizer = torch.optim.Adadelta(model.parameters(), lr=args.lr)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=args.gamma)
        on_gpu = run.device.type == "cuda"
        resident = on_gpu if args.resident is None else args.resident
        loader = run.loader(train_set, batch_size=args.batch_size, resident=resident)
        state = {"model": model, "optimizer": optimizer, "schedule": schedule, "loader": loader}
        run.resume(folder=args.checkpoint_dir, **state)

        def step(images: torch.Tensor, labels: torch.Tensor) -> None:
            with run.autocast():
                loss = F.cross_entropy(model(images), labels)
            run.backward(loss)
            run.update(optimizer)
            run.log(loss=loss)

        if on_gpu if args.capture is None else args.capture:
            step = run.capture(step)
        accuracy = None
        for epoch in run.epochs(1 if args.dry_run else args.epochs):
            for images, labels in run.steps(loader, max_steps=1 if args.dry_run else None):
                step(images, labels)
            schedule.step()
            accuracy = test(run, model, test_set, args.test_batch_size)
            run.log(accuracy=accuracy)
            run.report(accuracy=accuracy)  # the score in a sweep
            run.print(f"epoch {epoch + 1}: test accuracy {accuracy:.2%}")
        if accuracy is None:  # resumed after the last epoch
            accuracy = test(run, model, test_set, args.test_batch_size)
        run.print(f"final test accuracy: {accuracy:.2%} of {len(test_set)} images")


if __name__ == "__main__":
    main()
