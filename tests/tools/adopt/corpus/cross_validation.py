import torch
from torch.utils.data import DataLoader, Subset, TensorDataset


def loader_of(data, training):
    return DataLoader(data, batch_size=16, shuffle=training)


def fit(data, fold):
    model = torch.nn.BatchNorm1d(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = loader_of(data, True)
    for epoch in range(2):
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    for (x,) in loader_of(data, False):
        model(x)


if __name__ == "__main__":
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(80, 8))
    for fold in range(2):
        fit(Subset(data, range(fold * 40, fold * 40 + 40)), fold)
