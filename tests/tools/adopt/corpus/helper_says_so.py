"""A helper of the project finds the ranks; the script itself never says so."""
import torch
import utils
from torch.utils.data import DataLoader


def main(args):
    device = utils.init_distributed_device(args)
    model = utils.wrap(torch.nn.Linear(8, 1).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in DataLoader(utils.dataset(args), batch_size=8):
        model(x).mean().backward()
        optimizer.step()
