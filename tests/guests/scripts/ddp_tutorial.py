"""A trainer class in the manner of torch's DDP tutorial. It keeps its own snapshot and resumes from it."""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Points(Dataset):
    def __init__(self, size):
        generator = torch.Generator().manual_seed(0)
        self.data = [
            (torch.rand(20, generator=generator), torch.rand(1, generator=generator))
            for _ in range(size)
        ]

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.data[index]


class Trainer:
    def __init__(self, model, loader, optimizer, snapshot):
        self.rank = int(os.environ["LOCAL_RANK"])
        self.model, self.loader, self.optimizer, self.snapshot = model, loader, optimizer, snapshot
        self.epochs_run = 0
        if snapshot.exists():
            state = torch.load(snapshot)
            model.load_state_dict(state["model"])
            self.epochs_run = state["epochs_run"]
        self.model = DDP(model)

    def train(self, epochs):
        for epoch in range(self.epochs_run, epochs):
            self.loader.sampler.set_epoch(epoch)
            for source, target in self.loader:
                self.optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(self.model(source), target)
                loss.backward()
                self.optimizer.step()
            if self.rank == 0:
                state = {"model": self.model.module.state_dict(), "epochs_run": epoch + 1}
                # each node has a rank that saves
                partial = self.snapshot.with_suffix(f".{dist.get_rank()}")
                torch.save(state, partial)
                os.replace(partial, self.snapshot)
                print(f"epoch {epoch} done", flush=True)
            while os.environ.get("HOLD") == str(epoch) and not Path(os.environ["GATE"]).exists():
                time.sleep(0.05)


def main(out, epochs=3):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(20, 1)
    data = Points(64)
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
    trainer = Trainer(
        model, loader, torch.optim.SGD(model.parameters(), lr=0.1), Path(out) / "snapshot.pt"
    )
    trainer.train(epochs)
    (Path(out) / f"rank-{dist.get_rank()}").write_text(
        f"{dist.get_world_size()} {model.weight.sum().item():.9f}"
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
