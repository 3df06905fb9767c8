"""A GAN, as in the tutorial: two losses for the discriminator, and gradients of it that the generator's step leaves."""
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
netG, netD = nn.Linear(3, 4), nn.Linear(4, 1)
criterion = nn.BCEWithLogitsLoss()
optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-2); optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-2)
dataloader = DataLoader(TensorDataset(torch.randn(60, 4), torch.randn(60, 3)), batch_size=8)
for epoch in range(2):
    for i, (real, noise) in enumerate(dataloader, 0):
        netD.zero_grad()
        label = torch.ones(real.size(0), 1)
        errD_real = criterion(netD(real), label)
        errD_real.backward()
        fake = netG(noise)
        errD_fake = criterion(netD(fake.detach()), torch.zeros_like(label))
        errD_fake.backward()
        optimizerD.step()
        netG.zero_grad()
        errG = criterion(netD(fake), label)
