"""Hugging Face's Trainer, without any Paceline code: it saves when it is asked to stop, and it
resumes.

python train.py                                    one process, as usual
paceline run --cpu --nproc 2 train.py              two ranks
paceline submit --nodes 2 --gpus 4 train.py        eight ranks on a Slurm cluster

When the run must stop, Paceline sends SIGTERM, which the Trainer's just-in-time checkpoint handles:
it saves and ends the training. The model is a GPT-2 of two small layers, built from a
configuration: nothing is downloaded.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from sentences import LENGTH, WORDS, samples
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

START_ME_AGAIN = 75


def newest_checkpoint(folder: Path) -> str | None:
    """Return the newest complete checkpoint. Rank 0 writes the Trainer's state last."""
    complete = [path.parent for path in folder.glob("checkpoint-*/trainer_state.json")]
    return (
        str(max(complete, key=lambda path: int(path.name.rpartition("-")[2]))) if complete else None
    )


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a language model on sentences of a tiny language."
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=16, help="samples per step and rank (16)")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument(
        "--save-steps", type=int, default=100, help="also save every so many steps (100)"
    )
    parser.add_argument("--cpu", action="store_true", help="ignore GPUs")
    # in the run folder, if Paceline started the ranks
    folder = os.environ.get("PACELINE_CHECKPOINTS", "checkpoints")
    parser.add_argument("--folder", type=Path, default=folder, help="where to save (%(default)s)")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> float:
    args = arguments(given)
    set_seed(0)
    settings = TrainingArguments(
        output_dir=str(args.folder),
        max_steps=args.steps,
        per_device_train_batch_size=args.batch_size,
        learning_rate=args.lr,
        lr_scheduler_type="cosine",
        warmup_steps=20,
        use_cpu=args.cpu,
        seed=0,
        enable_jit_checkpoint=True,
        save_steps=args.save_steps,
        save_total_limit=2,
        logging_steps=50,
        report_to=[],
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
    )
    config = GPT2Config(
        vocab_size=len(WORDS),
        n_positions=LENGTH,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    trainer = Trainer(
        GPT2LMHeadModel(config),
        settings,
        train_dataset=samples(4000, seed=1),
        eval_dataset=samples(200, seed=2),
    )
    newest = newest_checkpoint(args.folder)
    if newest and trainer.is_world_process_zero():
        print(f"resumed at step {newest.rpartition('-')[2]}", flush=True)
    trainer.train(resume_from_checkpoint=newest)
    # it was stopped; the code below is for the end of the training
    if trainer.state.global_step < args.steps:
        sys.exit(START_ME_AGAIN)
    perplexity = math.exp(trainer.evaluate()["eval_loss"])
    if trainer.is_world_process_zero():
        print(f"final perplexity: {perplexity:.2f}", flush=True)
    return perplexity


if __name__ == "__main__":
    main()
