"""LBFGS, whose closure is called several times in a step."""
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(64, 4)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
for epoch in range(2):
    for x, y in loader:
        def closure():
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            return loss
        optimizer.step(closure)
