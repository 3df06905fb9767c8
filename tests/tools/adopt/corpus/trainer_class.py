"""A trainer of one's own."""
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Linear(8, width)
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        return self.head(self.body(x).relu())


class Trainer:
    def __init__(self, model, dataset, epochs=4, lr=0.1):
        self.device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
        self.model = model.to(self.device)
        self.epochs = epochs
        self.optimizer = torch.optim.SGD(
            [{"params": self.model.body.parameters(), "lr": lr / 2}, {"params": self.model.head.parameters()}],
            lr=lr,
        )
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, epochs)
        self.train_loader = DataLoader(dataset, batch_size=16, shuffle=True, drop_last=True)
        self.val_loader = DataLoader(dataset, batch_size=40, shuffle=False)

    def train_epoch(self):
        self.model.train()
        for x, y in self.train_loader:
            self.training_step(x.to(self.device), y.to(self.device))

    def training_step(self, x, y):
        self.optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.model(x), y)
        loss.backward()
        self.optimizer.step()

    def evaluate(self):
        self.model.eval()
        with torch.no_grad():
            for x, y in self.val_loader:
                self.model(x.to(self.device))

    def fit(self):
        for epoch in range(self.epochs):
            self.train_epoch()
            self.evaluate()
            self.scheduler.step()
            print("epoch", epoch)


if __name__ == "__main__":
    torch.manual_seed(0)
    x = torch.randn(80, 8)
    trainer = Trainer(Model(16), TensorDataset(x, x.mean(1, keepdim=True)))
    trainer.fit()
    torch.save(trainer.model.state_dict(), "model.pt")
