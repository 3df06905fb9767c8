"""A training loop with Accelerate."""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True)
set_seed(0)
numbers = torch.arange(64.0).unsqueeze(1) / 64
loader = DataLoader(TensorDataset(numbers, numbers * 3), batch_size=4)
plain = torch.nn.Linear(1, 1)
model, optimizer, loader = accelerator.prepare(
    plain, torch.optim.SGD(plain.parameters(), 0.1), loader
)
for x, y in loader:
    with accelerator.accumulate(model):
        optimizer.zero_grad()
        accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
        optimizer.step()
weight = accelerator.unwrap_model(model).weight.item()
result = Path(sys.argv[1]) / f"rank-{accelerator.process_index}"
result.write_text(f"{accelerator.num_processes} {weight:.9f}")
accelerator.end_training()
