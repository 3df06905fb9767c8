"""GPT-2 124M (examples/text) in bf16, compiled: tokens per second and MFU, beside the same loop in other libraries.

All ways train the same model on the same batch, in turn, for several rounds: the GPU gets slower as it gets warm.
"""

from __future__ import annotations

import logging
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import paceline
from gpu_parts.result import Result
from paceline.runtime.metrics.throughput import peak_flops

EXAMPLE = Path(__file__).parents[2] / "examples" / "text"
VOCABULARY = 50_304  # that of GPT-2, up to a multiple of 64
WARM_UP = 5

Loop = Callable[[int], float]  # takes a number of steps, and returns their seconds


def tools(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), fused=True)


def timed(step: Callable[[], None]) -> Loop:
    """Warm the step up, and return a function that times it."""
    for _ in range(WARM_UP):
        step()

    def loop(steps: int) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
        return time.perf_counter() - began

    return loop


def bare(make: Callable[[], nn.Module], x: torch.Tensor, y: torch.Tensor) -> Loop:
    plain = make().cuda()
    optimizer, model = tools(plain), torch.compile(plain)

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(x, y) / x.numel()
        loss.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return timed(step)


def with_fabric(make: Callable[[], nn.Module], x: torch.Tensor, y: torch.Tensor) -> Loop:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cuda", devices=1, precision="bf16-mixed")
    fabric.launch()
    plain = make()
    model, optimizer = fabric.setup(torch.compile(plain), tools(plain.cuda()))

    def step() -> None:
        loss = model(x, y) / x.numel()
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()

    return timed(step)


def with_accelerate(make: Callable[[], nn.Module], x: torch.Tensor, y: torch.Tensor) -> Loop:
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16")
    plain = make().cuda()
    model, optimizer = accelerator.prepare(torch.compile(plain), tools(plain))

    def step() -> None:
        loss = model(x, y) / x.numel()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return timed(step)


def with_paceline(
    run: paceline.Run, make: Callable[[], nn.Module], x: torch.Tensor, y: torch.Tensor
) -> Loop:
    model = run.wrap(make(), compile=True)
    optimizer = tools(model)
    count = torch.tensor(x.numel(), device=x.device)

    def loop(steps: int) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for inputs, targets in run.steps([(x, y)] * steps):
            with run.autocast():
                loss = model(inputs, targets)
            run.backward(loss, weight=count)
            run.throughput(tokens=x.numel())
            run.log(loss=loss.detach() / count)
            run.update(optimizer, clip=1.0)
        torch.cuda.synchronize()
        return time.perf_counter() - began

    loop(WARM_UP)
    return loop


def measure(repeats: int, *, batch: int = 64, steps: int = 30) -> list[Result]:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    sys.path.insert(0, str(EXAMPLE))
    from model import GPT, SIZES

    size = SIZES["124M"]

    def make() -> nn.Module:
        torch.manual_seed(0)
        return GPT(size, vocab=VOCABULARY)

    x, y = (torch.randint(VOCABULARY, (batch, size.block), device="cuda") for _ in range(2))
    loops: dict[str, Loop] = {}
    with paceline.session(seed=0, precision="bf16", progress=False, report=False) as run:
        ways: dict[str, Callable[[], Loop]] = {
            "Paceline": lambda: with_paceline(run, make, x, y),
            "a bare loop": lambda: bare(make, x, y),
            "Fabric": lambda: with_fabric(make, x, y),
            "Accelerate": lambda: with_accelerate(make, x, y),
        }
        for name, way in ways.items():
            try:
                loops[name] = way()
            except ImportError as error:
                print(f"{name}: not measured, {error.name} is not installed")
        found: dict[str, list[float]] = {name: [] for name in loops}
        for turn in range(repeats + 1):
            for name, loop in loops.items():
                rate = batch * size.block * steps / loop(steps)
                if turn:  # the first round warms the GPU
                    found[name].append(rate)
        facts = efficiency(make(), size, found["Paceline"])
    ours = found.pop("Paceline")
    targets = {"a bare loop": 0.995, "Fabric": 1.0, "Accelerate": 1.0}
    known = {name: target for name, target in targets.items() if name in found}
    return [Result(f"GPT-2 124M, batch {batch}", "tokens/s", ours, found, known, facts)]


def efficiency(model: nn.Module, size: Any, rates: list[float]) -> dict[str, float]:
    """Return the share of the GPU's peak, by the convention of `paceline.transformer_flops`."""
    flops = paceline.transformer_flops(
        model, layers=size.layers, width=size.width, length=size.block
    )
    peak = peak_flops(torch.device("cuda"), torch.bfloat16)
    best = max(rates) * flops
    return {"TFLOP/s": best / 1e12, **({"MFU": best / peak, "MFU, target": 0.55} if peak else {})}
