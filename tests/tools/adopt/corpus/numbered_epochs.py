"""Epochs from 1, counted in an attribute; a copy of the weights that follows them; a file for each epoch."""
import copy
import json

import torch
from torch.utils.data import DataLoader, TensorDataset


class Trainer:
    def __init__(self, epochs=3):
        torch.manual_seed(0)
        x = torch.randn(64, 4)
        self.loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, drop_last=True)
        self.model = torch.nn.Linear(4, 1)
        self.ema = copy.deepcopy(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.epochs = epochs

    def step(self, batch):
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.model(x), y)
        self.optimizer.zero_grad(); loss.backward(); self.optimizer.step()
        with torch.no_grad():
            for mine, trained in zip(self.ema.parameters(), self.model.parameters()):
                mine.lerp_(trained, 0.1)

    def train(self):
        for self.epoch in range(1, self.epochs + 1):
            self.model.train()
            for batch in self.loader: self.step(batch)
            with open(f"epoch-{self.epoch}.json", "w") as file:
                norm = self.ema.weight.norm().item()
                json.dump({"norm": norm}, file)
            print(self.epoch, norm)


if "__main__" == __name__:
    Trainer().train()
