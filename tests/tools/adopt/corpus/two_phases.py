"""Two loops over epochs, the second with another loss; one line per step, and a backward of torch.autograd."""
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(60, 4); data = TensorDataset(x, x.sum(1, keepdim=True))
model = torch.nn.Linear(4, 1); optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loader = DataLoader(data, batch_size=8)
for epoch in range(2):
    for x, y in loader: loss = (model(x) - y).abs().mean(); optimizer.zero_grad(); loss.backward(); optimizer.step()
for epoch in range(3):
    for x, y in loader:
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad(); torch.autograd.backward(loss); optimizer.step()
