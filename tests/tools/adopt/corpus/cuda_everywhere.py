# This one runs on a GPU only, until it is adopted.
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train_one_epoch(model, criterion, optimizer, loader, epoch):
    for x, y in loader:
        x = x.cuda(non_blocking=True)
        y = y.cuda(0)
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("epoch", epoch, "loss", loss.item(), flush=True)


if __name__ == "__main__":
    torch.manual_seed(0)
    model, criterion = nn.Linear(8, 1).cuda(), nn.MSELoss().to("cuda")
    weight = torch.ones(1, device="cuda:0")
    x = torch.randn(80, 8)
    loader = DataLoader(dataset=TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(3): train_one_epoch(model, criterion, optimizer, loader, epoch)
