import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
real_points = TensorDataset(torch.randn(80, 2) * 0.5 + 2)
dataloader = DataLoader(real_points, batch_size=16, shuffle=True, drop_last=True)
netG = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2)).to(device)
netD = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1)).to(device)
optimizerD = optim.Adam(netD.parameters(), lr=1e-2)
optimizerG = optim.Adam(netG.parameters(), lr=1e-2)
criterion = nn.BCEWithLogitsLoss()

for epoch in range(3):
    for i, (real,) in enumerate(dataloader, 0):
        real = real.to(device)
        noise = real.flip(1) - 2  # not random, so that one rank and two get the same
        netD.zero_grad()
        errD_real = criterion(netD(real), torch.ones(len(real), 1, device=device))
        fake = netG(noise)
        errD_fake = criterion(netD(fake.detach()), torch.zeros(len(real), 1, device=device))
        errD = errD_real + errD_fake
        errD.backward()
        optimizerD.step()

        netG.zero_grad()
        errG = criterion(netD(fake), torch.ones(len(real), 1, device=device))
        errG.backward()
        optimizerG.step()
    print(f"[{epoch}] Loss_D: {errD.item():.4f} Loss_G: {errG.item():.4f}")
