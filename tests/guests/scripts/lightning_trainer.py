"""Lightning's Trainer."""

import os
import sys
from pathlib import Path

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset


class Line(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, _):
        x, y = batch
        return torch.nn.functional.mse_loss(self.layer(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def main(out):
    lightning.seed_everything(0)
    numbers = torch.arange(64.0).unsqueeze(1) / 64
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="ddp",
        max_epochs=1,
        logger=False,
        default_root_dir=out,
        devices=int(os.environ.get("GUEST_DEVICES", "2")),
        num_nodes=int(os.environ.get("GUEST_NODES", "1")),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Line()
    trainer.fit(model, DataLoader(TensorDataset(numbers, numbers * 3), batch_size=4))
    (Path(out) / f"rank-{trainer.global_rank}").write_text(
        f"{trainer.world_size} {model.layer.weight.item():.9f}"
    )


if __name__ == "__main__":
    main(sys.argv[1])
