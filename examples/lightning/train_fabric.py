"""Lightning Fabric: your own loop, on any device. Fabric installs no signal handler, so the script
installs its own.

paceline run --cpu --nproc 2 train_fabric.py
paceline submit --nodes 2 --gpus 4 train_fabric.py

When the run must stop, Paceline sends SIGUSR1. The script then saves and exits with 75, which means
"start me again".
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from points import ResumableLoader, network, spirals
from torch.utils.data import DistributedSampler
from train import arguments

START_ME_AGAIN = 75


def main(given: Sequence[str] | None = None) -> float:
    args = arguments(given)
    requests: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: requests.append(number))
    fabric = Fabric(
        accelerator="auto" if torch.cuda.is_available() and not args.cpu else "cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        strategy="ddp",
    )
    fabric.launch()
    fabric.seed_everything(0)
    net = network()
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=args.lr))
    data = spirals(args.samples, seed=1)
    sampler = DistributedSampler(
        data, fabric.world_size, fabric.global_rank, seed=0, drop_last=True
    )
    loader = ResumableLoader(data, args.batch_size, sampler=sampler, drop_last=True)

    path = args.folder / "fabric.ckpt"
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0}
    if path.exists():
        fabric.load(path, state)
        loader.load_state_dict({"batches": state["step"]})
        fabric.print(f"resumed at step {state['step']}", flush=True)

    while state["step"] < args.epochs * len(loader):
        epoch = state["step"] // len(loader)
        sampler.set_epoch(epoch)
        for points, arms in loader:
            loss = F.cross_entropy(model(points.to(fabric.device)), arms.to(fabric.device))
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
            state["step"] += 1
            # The signal does not reach all ranks in the same step, so they ask each other after
            # every step.
            must_stop = bool(fabric.all_reduce(torch.tensor(float(len(requests))), reduce_op="sum"))
            if must_stop or state["step"] % len(loader) == 0:
                # under another name first: there is always one whole checkpoint
                fabric.save(path, state)
            if must_stop:
                raise SystemExit(START_ME_AGAIN)
        fabric.print(f"epoch {epoch + 1}: loss {loss.item():.3f}", flush=True)

    part = slice(fabric.global_rank, None, fabric.world_size)
    points, arms = (each[part].to(fabric.device) for each in spirals(1000, seed=2).tensors)
    with torch.no_grad():
        right = (model(points).argmax(dim=1) == arms).float().mean()
    accuracy = float(fabric.all_reduce(right))
    fabric.print(f"final test accuracy: {accuracy:.2%}", flush=True)
    return accuracy


if __name__ == "__main__":
    main()
