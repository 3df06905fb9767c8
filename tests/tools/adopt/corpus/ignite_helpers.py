"""A library starts the ranks, wraps the model and makes the loaders."""
import ignite.distributed as idist
import torch


def training(local_rank, config):
    model = idist.auto_model(torch.nn.Linear(8, 1))
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))
    loader = idist.auto_dataloader(torch.randn(64, 8), batch_size=8, shuffle=True, drop_last=True)
    for x in loader:
        optimizer.zero_grad()
        model(x.to(idist.device())).mean().backward()
        optimizer.step()


def run(backend=None, **config):
    with idist.Parallel(backend=backend) as parallel:
        parallel.run(training, config)
