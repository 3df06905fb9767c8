"""Tensor parallelism over a mesh of devices."""
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

mesh = init_device_mesh("cpu", (2,))
model = parallelize_module(torch.nn.Sequential(torch.nn.Linear(8, 8)), mesh, {"0": ColwiseParallel()})
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
for step in range(4):
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
