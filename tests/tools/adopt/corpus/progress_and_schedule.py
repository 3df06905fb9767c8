import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset


class tqdm:  # as the package does, without it
    def __init__(self, iterable, desc=""):
        self.iterable = iterable

    def __iter__(self):
        yield from self.iterable

    def set_postfix(self, **values):
        pass


def set_seed(seed):
    np.random.seed(seed)
    torch.manual_seed(seed)


def main():
    set_seed(5)
    epochs, device = 3, torch.device("cuda" if torch.cuda.is_available() else "cpu")
    x = torch.randn(90, 8)
    train_dl = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 16, True, drop_last=True)
    run = "a name that is taken"
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 1)).to(device)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-2)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=1e-2, total_steps=epochs * len(train_dl))
    for epoch in range(epochs):
        pbar = tqdm(train_dl, desc=f"{run} {epoch}")
        for xb, yb in pbar:
            opt.zero_grad()
            loss = (net(xb.to(device)) - yb.to(device)).square().mean()
            loss.backward()
            opt.step()
            sched.step()
            pbar.set_postfix(loss=f"{loss.item():.3f}")


if __name__ == "__main__":
    main()
