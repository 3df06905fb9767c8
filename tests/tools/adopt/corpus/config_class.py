"""Settings in a data class, and helpers that make the loaders, the model and the optimizer."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


@dataclass
class Config:
    batch_size: int = 16
    epochs: int = 4
    lr: float = 0.05
    device: str = "cuda" if torch.cuda.is_available() else "cpu"


def make_loaders(cfg):
    x = torch.randn(100, 8)
    train, valid = random_split(TensorDataset(x, x.prod(1, keepdim=True)), [80, 20])
    return (
        DataLoader(train, batch_size=cfg.batch_size, shuffle=True, num_workers=0),
        DataLoader(valid, batch_size=cfg.batch_size),
    )


def make_model(cfg):
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)).to(cfg.device)


def make_optimizer(model, cfg):
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=cfg.lr)


def run_epoch(model, loader, optimizer, cfg):
    total = 0.0
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x.to(cfg.device)), y.to(cfg.device))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total += loss.item()
    return total / len(loader)


@torch.no_grad()
def validate(model, loader, cfg):
    return sum(nn.functional.mse_loss(model(x.to(cfg.device)), y.to(cfg.device)).item() for x, y in loader) / len(loader)


def main(cfg: Config):
    train_loader, valid_loader = make_loaders(cfg)
    model = make_model(cfg)
    optimizer = make_optimizer(model, cfg)
    best = float("inf")
    for epoch in range(cfg.epochs):
        train_loss = run_epoch(model, train_loader, optimizer, cfg)
        valid_loss = validate(model, valid_loader, cfg)
        print(f"{epoch=} {train_loss=:.4f} {valid_loss=:.4f}")
        if valid_loss < best:
            best = valid_loss
            torch.save(model.state_dict(), "best.pt")


if __name__ == "__main__":
    main(Config())
