"""Train a language model with the GPT-2 architecture on any text: `--data FILE_OR_FOLDER`, or
made-up stories.

python train.py                                        one process, the tiny model
paceline run --nproc 2 --cpu train.py                  two ranks; about half a minute on two cores
paceline submit --nodes 2 --gpus 8 train.py --data books --tokenizer bpe --vocab 32768 --size 124M
\\
    --batch-size 512 --accumulate 2 --precision bf16 --compile --steps 20000 --warmup 500
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from loss import IGNORE
from model import GPT, SIZES
from tokens import Blocks, prepare

import paceline


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small or not so small GPT-2.")
    text = parser.add_argument_group("text")
    text.add_argument(
        "--data", type=Path, help="a text file, or a folder of .txt files (made-up stories)"
    )
    text.add_argument(
        "--tokenizer", default="bytes", help="bytes, bpe, or a tokenizer.json (bytes)"
    )
    text.add_argument(
        "--vocab", type=int, default=4096, help="number of tokens that bpe trains (4096)"
    )
    text.add_argument(
        "--tokens", type=Path, help="folder for files of tokens (in the scratch folder)"
    )
    model = parser.add_argument_group("model")
    model.add_argument("--size", default="tiny", choices=SIZES)
    model.add_argument("--dropout", type=float, default=0.0)
    model.add_argument(
        "--init-from", type=Path, help="weights of GPT-2 in safetensors format, for --size 124M"
    )
    model.add_argument("--fsdp", action="store_true", help="shard the model over the ranks")
    model.add_argument("--compile", action="store_true")
    model.add_argument("--precision", default="fp32", choices=["fp32", "bf16", "fp16"])
    training = parser.add_argument_group("training")
    training.add_argument("--steps", type=int, default=400)
    training.add_argument(
        "--batch-size", type=int, default=32, help="blocks per step over all ranks (32)"
    )
    training.add_argument("--accumulate", type=int, default=1, help="micro-steps per step (1)")
    training.add_argument("--lr", type=float, help="highest learning rate (by size)")
    training.add_argument(
        "--warmup", type=int, default=20, help="steps until the learning rate is there (20)"
    )
    training.add_argument(
        "--eval-every", type=int, default=100, help="steps between evaluations, 0 for none (100)"
    )
    training.add_argument(
        "--workers", type=int, default=0, help="processes per rank that load data (0)"
    )
    training.add_argument("--seed", type=int, default=1)
    training.add_argument("--cpu", action="store_true", help="ignore GPUs")
    training.add_argument(
        "--folder", type=Path, help="where to save without `paceline run` (nowhere)"
    )
    parser.add_argument(
        "--prompt", default="Once there was ", help="what the text at the end begins with"
    )
    parser.add_argument("--sample", type=int, default=200, help="tokens to write at the end (200)")
    args = parser.parse_args(given)
    if args.sample and not args.prompt:
        parser.error("--sample needs a --prompt of at least one character")
    return args


def rate(step: int, *, warmup: int, steps: int) -> float:
    """Return the share of the learning rate: a linear warm-up, then half a cosine down to a
    tenth.
    """
    if step < warmup:
        return (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


def make_optimizer(model: GPT, lr: float, device: torch.device) -> torch.optim.Optimizer:
    """Return AdamW with weight decay for matrices, and none for biases and norms."""
    matrices = [each for each in model.parameters() if each.dim() >= 2]
    others = [each for each in model.parameters() if each.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=device.type == "cuda")


@torch.no_grad()
def evaluate(run: paceline.Run, model: GPT, data: Blocks, batch_size: int) -> float:
    """Return the perplexity: over all ranks, and over tokens that are no padding."""
    model.eval()
    loss, count = (
        torch.zeros((), device=run.device),
        torch.zeros((), dtype=torch.int64, device=run.device),
    )
    for inputs, targets in run.evaluate(data, batch_size=batch_size):
        with run.autocast():
            loss += model(inputs, targets)
        count += (targets != IGNORE).sum()
    model.train()
    return math.exp(run.sum(loss) / run.sum(count))


def printable(text: str) -> str:
    """Escape what is no text: after a few steps, the model writes control characters, which change
    a terminal.
    """
    return "".join(
        each if each.isprintable() or each == "\n" else repr(each)[1:-1] for each in text
    )


def main(given: Sequence[str] | None = None) -> float:
    args = arguments(given)
    size = SIZES[args.size]
    with paceline.session(
        seed=args.seed,
        cpu=args.cpu,
        precision=args.precision,
        max_steps=args.steps,
        folder=args.folder,
    ) as run:
        folder = args.tokens or (run.scratch_dir or Path("runs")) / "tokens"
        with run.rank_zero_first():  # for the others, the file is there already
            corpus = prepare(args.data, folder, tokenizer=args.tokenizer, vocab=args.vocab)
        train_set, validation_set = (
            corpus.blocks("train", size.block),
            corpus.blocks("validation", size.block),
        )

        loader = run.loader(
            train_set,
            batch_size=args.batch_size,
            accumulate=args.accumulate,
            num_workers=args.workers,
        )
        model = GPT(size, vocab=corpus.tokenizer.vocab, dropout=args.dropout)
        if args.init_from:
            model.load_gpt2(args.init_from)
        # per token
        flops = paceline.transformer_flops(
            model, layers=size.layers, width=size.width, length=size.block
        )
        model = run.wrap(model, mode="fsdp" if args.fsdp else "auto", compile=args.compile)
        optimizer = make_optimizer(model, size.lr if args.lr is None else args.lr, run.device)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, partial(rate, warmup=args.warmup, steps=args.steps)
        )
        run.resume(model=model, optimizer=optimizer, schedule=schedule, loader=loader)

        for _ in run.epochs(math.ceil(args.steps / loader.steps_per_epoch)):
            for inputs, targets in run.steps(loader):
                with run.autocast():
                    loss = model(inputs, targets)  # a sum over the tokens of this rank
                count = (targets != IGNORE).sum()
                run.backward(loss, weight=count)
                run.throughput(tokens=inputs.numel(), flops=inputs.numel() * flops)
                run.log(loss=loss.detach() / count, lr=schedule.get_last_lr()[0])
                if run.update(optimizer, clip=1.0):
                    schedule.step()
                    done = run.step + 1
                    if args.eval_every and done % args.eval_every == 0 and done < args.steps:
                        perplexity = evaluate(run, model, validation_set, args.batch_size)
                        run.log(perplexity=perplexity)
                        run.print(f"step {done}: perplexity {perplexity:.2f}")

        perplexity = evaluate(run, model, validation_set, args.batch_size)
        run.log(perplexity=perplexity)
        run.report(perplexity=perplexity)  # the score in a sweep
        run.print(
            f"final perplexity: {perplexity:.2f} (a unigram model has "
            f"{corpus.unigram_perplexity():.2f})"
        )
        # All ranks write the same text: with FSDP2, each of them holds a part of the model.
        model.eval()
        prompt = corpus.tokenizer.encode(args.prompt).tolist()
        with run.autocast():
            written = model.generate(
                prompt, args.sample, generator=torch.Generator().manual_seed(args.seed)
            )
        run.print(printable(corpus.tokenizer.decode(written)))
        return perplexity


if __name__ == "__main__":
    main()
