# Größen und Namen, die nicht aus ASCII bestehen: ä ö ü ß 漢字 🙂
import torch
from torch.utils.data import DataLoader, TensorDataset

größe = 16; titel = "Übung 🙂"; torch.manual_seed(1)
werte = torch.randn(80, 8)
# ← 漢字
lader = DataLoader(TensorDataset(werte, werte.sum(1, keepdim=True)), größe, shuffle="ü" == "ü")
modell = torch.nn.Linear(8, 1); 漢 = "字"
optimierer = torch.optim.SGD(modell.parameters(), lr=0.05)
for durchlauf in range(3):
    for x, ziel in lader:
        optimierer.zero_grad()
        fehler = (modell(x) - ziel).pow(2).mean()
        fehler.backward(); optimierer.step()
    print("ß", durchlauf, "🙂", fehler.item())
