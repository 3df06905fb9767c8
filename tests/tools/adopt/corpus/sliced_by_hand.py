import torch

x = torch.randn(80, 8)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    order = torch.randperm(80)
    for start in range(0, 80, 16):
        part = x[order[start : start + 16]]
        loss = (model(part) - part.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
