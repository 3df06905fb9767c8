"""Train on tar shards with a WebDataset pipeline. Each rank and each of its workers reads its own
shards.

python make_shards.py ../mnist/data shards                once: tar files of the bundled digits
paceline run --cpu --nproc 2 train.py                     two ranks with two workers each
paceline submit --gpus 4 train.py --shards /data/shards   four ranks on a Slurm cluster
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import webdataset as wds
from torch import nn

import paceline


def to_tensors(sample: tuple[np.ndarray, int]) -> tuple[torch.Tensor, int]:
    image, label = sample
    return torch.from_numpy(image).float() / 255, label


def read(folder: Path, part: str, *, shuffle: bool) -> wds.WebDataset:
    """Return a pipeline over the shards of a part. It mentions neither ranks nor workers: the
    loader splits it.
    """
    urls = sorted(str(path) for path in folder.glob(f"{part}-*.tar"))
    if not urls:
        raise SystemExit(f"no {part}-*.tar in {folder}; make them with make_shards.py")
    data = wds.WebDataset(urls, shardshuffle=len(urls) if shuffle else False)
    if shuffle:
        data = data.shuffle(500)  # samples in memory, from which it draws
    return data.decode().to_tuple("npy", "cls").map(to_tensors)


@torch.no_grad()
def evaluate(run: paceline.Run, model: nn.Module, data: wds.WebDataset) -> float:
    hits = seen = 0
    for images, labels in run.evaluate(data, batch_size=500):
        hits += (model(images).argmax(dim=1) == labels).sum()
        seen += len(labels)
    return float(run.sum(hits) / run.sum(seen))


def main(given: Sequence[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description="Read handwritten digits from tar shards.")
    parser.add_argument(
        "--shards", type=Path, default=Path("shards"), help="folder with tar files (shards)"
    )
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument(
        "--batch-size", type=int, default=64, help="samples per step over all ranks (64)"
    )
    parser.add_argument(
        "--workers", type=int, default=2, help="processes per rank that read shards (2)"
    )
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--cpu", action="store_true", help="ignore GPUs")
    parser.add_argument(
        "--folder", type=Path, help="where to save without `paceline run` (nowhere)"
    )
    args = parser.parse_args(given)
    train_set, test_set = (
        read(args.shards, "train", shuffle=True),
        read(args.shards, "t10k", shuffle=False),
    )
    with paceline.session(seed=0, cpu=args.cpu, folder=args.folder) as run:
        # With drop_last=False, every sample counts once per epoch, although the shards of the ranks
        # differ in length.
        loader = run.loader(
            train_set, batch_size=args.batch_size, num_workers=args.workers, drop_last=False
        )
        net = nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
        model = run.wrap(net)
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
        run.resume(model=model, optimizer=optimizer, loader=loader)
        for epoch in run.epochs(args.epochs):
            for images, labels in run.steps(loader):
                loss = F.cross_entropy(model(images), labels)
                run.backward(loss)
                run.update(optimizer)
                run.log(loss=loss)
            accuracy = evaluate(run, model, test_set)
            run.log(accuracy=accuracy)
            run.print(f"epoch {epoch + 1}: test accuracy {accuracy:.2%}")
        accuracy = evaluate(run, model, test_set)
        run.print(f"final test accuracy: {accuracy:.2%}")
        return accuracy


if __name__ == "__main__":
    main()
