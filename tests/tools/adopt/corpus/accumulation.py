import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

ACCUMULATE = 2


def main():
    torch.manual_seed(0)
    x = torch.randn(96, 8)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True, drop_last=True)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    optimizer.zero_grad()
    for epoch in range(3):
        for step, (inputs, targets) in enumerate(loader):
            loss = F.mse_loss(model(inputs), targets) / ACCUMULATE
            loss.backward()
            if (step + 1) % ACCUMULATE == 0:
                optimizer.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    main()
