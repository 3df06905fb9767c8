# %% [markdown]
# # A notebook, exported

# %%
import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
print(f"Using {device} device")

# %%
x = torch.randn(80, 8)
y = x.sum(1, keepdim=True)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=16, shuffle=True)

# %%
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).to(device)
loss_fn = nn.MSELoss()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
model

# %%
losses = []
for epoch in range(4):
    for X, Y in loader:
        X, Y = X.to(device), Y.to(device)
        pred = model(X)
        loss = loss_fn(pred, Y)  # the mean

        # Backpropagation
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(epoch, losses[-1])

# %%
torch.save({
    "model": model.state_dict(),
    "note": """a text
of two lines""",
}, "model.pt")
print("Done!")
