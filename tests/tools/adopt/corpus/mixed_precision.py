import torch
import torch.nn as nn
from torch.amp import GradScaler, autocast
from torch.utils.data import DataLoader, TensorDataset

use_amp = torch.cuda.is_available()


def main(epochs: int = 3) -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(80, 8)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16, shuffle=True, pin_memory=use_amp)
    model = nn.Linear(8, 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = GradScaler(device, enabled=use_amp)
    for epoch in range(epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            with autocast(device_type=device, dtype=torch.float16, enabled=use_amp):
                loss = nn.functional.mse_loss(model(inputs.to(device)), targets.to(device))
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        print(f"epoch {epoch}: {loss.item():.3f}")


if __name__ == "__main__":
    main()
