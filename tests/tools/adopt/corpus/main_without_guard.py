import torch, torch.nn as nn
from torch.utils.data import Dataset, DataLoader

torch.manual_seed(3)


class Squares(Dataset):
    def __len__(self): return 71  # not a multiple of the batch size

    def __getitem__(self, i):
        x = torch.tensor([i / 71.0])
        return x, x * x


def main():
    net = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    data = DataLoader(Squares(), batch_size=16, shuffle=True)
    for epoch in range(4):
        for x, y in data:
            opt.zero_grad()
            ((net(x) - y) ** 2).mean().backward()
            opt.step()
    print("done")


main()
