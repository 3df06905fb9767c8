"""What it costs to keep replicas equal: DDP inside a wrapped model against plain DDP, and the check of replicas.

    python benchmarks/replicas.py [--steps 100] [--rounds 5]

One rank, on a GPU over NCCL if there is one: host and device do the work of any number of ranks, without the network.
The model is a transformer of 12 layers (124 million parameters on a GPU, fewer on a CPU) on a batch so small that the
host's overhead shows. The two ways take turns, and each one's fastest round counts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from paceline.runtime.training.checksum import Checksum
from paceline.runtime.training.ddp import DDPModel

from machine import describe, show

EVERY = 100  # steps between two checks, by default


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention = nn.ModuleList([nn.Linear(width, 3 * width), nn.Linear(width, width)])
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.heads = width // 64

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        parts = (
            self.attention[0](self.norms[0](x))
            .view(rows, length, 3, self.heads, 64)
            .permute(2, 0, 3, 1, 4)
        )
        mixed = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.attention[1](mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.feed(self.norms[1](x))


class Transformer(nn.Module):
    def __init__(self, width: int, words: int, length: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(12)])
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return nn.functional.linear(self.norm(x), self.words.weight).float().square().mean()


def make_steps(device: torch.device, control: object) -> dict[str, Callable[[], None]]:
    """Return one training step for each way."""
    width, words = (768, 50304) if device.type == "cuda" else (64, 512)
    tokens = torch.randint(words, (1, 64), device=device)

    def step_of(
        model: nn.Module, forward: nn.Module, reduce: Callable[[], None]
    ) -> Callable[[], None]:
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)

        def step() -> None:
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
                loss = forward(tokens)
            loss.backward()
            reduce()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return step

    torch.manual_seed(0)
    plain = Transformer(width, words, 64).to(device)
    index = [device] if device.type == "cuda" else None
    ours = Transformer(width, words, 64).to(device)
    wrapped = DDPModel(
        ours, device=device, control=control, compile_options=False, comm_hook=None, options={}
    )
    seen = [0]

    def reduce() -> None:
        seen[0] = wrapped.reduce_gradients(seen[0])

    ddp = nn.parallel.DistributedDataParallel(plain, device_ids=index)
    return {PLAIN: step_of(plain, ddp, lambda: None), OURS: step_of(ours, ours, reduce)}


PLAIN, OURS = "plain DDP", "run.wrap"


def measure(step: Callable[[], object], steps: int, device: torch.device) -> float:
    began = time.perf_counter()
    for _ in range(steps):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / steps


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=100, help="steps per round")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    backend = "nccl" if device.type == "cuda" else "gloo"
    known = {"device_id": device} if device.type == "cuda" else {}
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, **known)  # type: ignore[arg-type]
    ways = make_steps(device, dist.new_group(backend="gloo"))
    best = dict.fromkeys(ways, float("inf"))
    for number in range(args.rounds + 1):  # the first is a warm-up
        for name, step in ways.items():
            took = measure(step, args.steps, device)
            best[name] = min(best[name], took) if number else best[name]
    width, words = (768, 50304) if device.type == "cuda" else (64, 512)
    parameters = list(Transformer(width, words, 64).to(device).parameters())
    Checksum(parameters).value()
    issue = min(measure(lambda: Checksum(parameters), 1, torch.device("cpu")) for _ in range(10))
    whole = min(measure(lambda: Checksum(parameters).value(), 1, device) for _ in range(10))
    dist.destroy_process_group()

    describe("replicas")
    rows = [
        (name, f"{seconds * 1e3:.2f} ms", f"{seconds / best[PLAIN]:.3f}x")
        for name, seconds in best.items()
    ]
    show(("one step", "time", "against plain DDP"), rows)
    share = whole / EVERY / best[PLAIN]
    print(
        f"A checksum of all parameters takes {whole * 1e3:.2f} ms, {issue * 1e3:.2f} ms of them on the host: "
        f"{share:.2%} of the steps if it is computed every {EVERY}."
    )


if __name__ == "__main__":
    main()
