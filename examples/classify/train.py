"""Classify texts: train a small encoder from scratch, or fine-tune one from Hugging Face.

python train.py                                          one process, on made-up messages to a
shop's support paceline run --nproc 2 --cpu train.py                    two ranks; half a minute on
two cores paceline submit --gpus 4 train.py --data reviews.csv --hf-model distilbert-base-uncased
--precision bf16
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from batches import LengthBuckets, Padding, Texts, Vocabulary
from model import Encoder, Pretrained, PretrainedTokenizer
from tickets import read
from torch import nn
from torch.utils.data import DataLoader

import paceline


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a text classifier.")
    parser.add_argument(
        "--data", type=Path, help='.csv or .jsonl with "text" and "label" (made-up messages)'
    )
    parser.add_argument(
        "--hf-model",
        help="a model of the Hugging Face hub, or a folder with one (train from scratch)",
    )
    parser.add_argument(
        "--max-length", type=int, default=256, help="tokens of a text that count (256)"
    )
    parser.add_argument(
        "--batch-size", type=int, default=64, help="texts per step over all ranks (64)"
    )
    parser.add_argument("--accumulate", type=int, default=1, help="micro-steps per step (1)")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument(
        "--lr", type=float, help="highest learning rate (2e-3, or 5e-5 with --hf-model)"
    )
    parser.add_argument("--dropout", type=float, default=0.1, help="of the small encoder (0.1)")
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16", "fp16"])
    parser.add_argument(
        "--workers", type=int, default=0, help="processes per rank that load data (0)"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cpu", action="store_true", help="ignore GPUs")
    parser.add_argument(
        "--folder", type=Path, help="where to save without `paceline run` (nowhere)"
    )
    return parser.parse_args(given)


def split(rows: list[tuple[str, str]]) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return every text but each tenth for training, and those for the test."""
    return [row for number, row in enumerate(rows) if number % 10], rows[::10]


@torch.no_grad()
def evaluate(run: paceline.Run, model: nn.Module, data: DataLoader) -> float:
    """Return the accuracy. Each text counts once, on whichever rank."""
    model.eval()
    hits = seen = 0
    for tokens, mask, labels in run.evaluate(data):
        with run.autocast():
            hits += (model(tokens, mask).argmax(1) == labels).sum()
        seen += len(labels)
    model.train()
    return float(run.sum(hits) / run.sum(seen))


def main(given: Sequence[str] | None = None) -> float:
    args = arguments(given)
    with paceline.session(
        seed=args.seed, cpu=args.cpu, precision=args.precision, folder=args.folder
    ) as run:
        rows = read(args.data)
        names = sorted({label for _, label in rows})
        train_rows, test_rows = split(rows)
        with run.rank_zero_first():  # it may download the model
            if args.hf_model:
                encoder = PretrainedTokenizer(args.hf_model, max_length=args.max_length)
                model: nn.Module = Pretrained(args.hf_model, labels=names)
            else:
                encoder = Vocabulary([text for text, _ in train_rows], max_length=args.max_length)
                model = Encoder(
                    vocab=len(encoder),
                    labels=len(names),
                    length=args.max_length + 8,
                    dropout=args.dropout,
                )

        def make_texts(rows: list[tuple[str, str]]) -> Texts:
            return Texts(
                encoder.encode([text for text, _ in rows]),
                [names.index(label) for _, label in rows],
            )

        train_set, test_set = make_texts(train_rows), make_texts(test_rows).by_length()
        pad = Padding(encoder.padding)
        buckets = LengthBuckets(train_set.lengths, args.batch_size)
        loader = run.loader(
            train_set,
            batch_sampler=buckets,
            accumulate=args.accumulate,
            collate_fn=pad,
            num_workers=args.workers,
        )
        model = run.wrap(model)
        lr = args.lr or (5e-5 if args.hf_model else 2e-3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=lr, total_steps=args.epochs * len(buckets) + 1, pct_start=0.1
        )
        tests = DataLoader(test_set, batch_size=4 * args.batch_size, collate_fn=pad)
        run.resume(model=model, optimizer=optimizer, schedule=schedule, loader=loader)

        accuracy = None
        for epoch in run.epochs(args.epochs):
            for tokens, mask, labels in run.steps(loader):
                with run.autocast():
                    loss = F.cross_entropy(model(tokens, mask), labels, reduction="sum")
                # the mean over the texts of all ranks, however many each has
                run.backward(loss, weight=len(labels))
                run.log(loss=loss.detach() / len(labels), padding=1 - mask.float().mean())
                if run.update(optimizer, clip=1.0):
                    schedule.step()
            accuracy = evaluate(run, model, tests)
            run.log(accuracy=accuracy)
            run.report(accuracy=accuracy)  # the score in a sweep
            run.print(f"epoch {epoch + 1}: test accuracy {accuracy:.2%}")
        if accuracy is None:  # resumed after the last epoch
            accuracy = evaluate(run, model, tests)
        run.print(
            f"final test accuracy: {accuracy:.2%} of {len(test_set)} texts; by chance "
            f"{1 / len(names):.0%}"
        )
        return accuracy


if __name__ == "__main__":
    main()
