# %% [markdown]
# # Which layer diverges?
# One layer of this network has a learning rate that is far too high. The loss says that something is wrong; the
# numbers that `opt.watch` takes from inside the steps say where. Runs on a CPU in seconds.

# %%
import torch
from torch import nn

from optgen.optim import AdamW

torch.manual_seed(0)
model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh())), nn.Linear(64, 1))
wrong = "4."
groups = [
    {"params": [(n, p) for n, p in model.named_parameters() if n.startswith(wrong) == high], "lr": lr}
    for high, lr in ((False, 1e-3), (True, 0.5))
]
opt = AdamW(groups, plan="int8_split24")

# %% [markdown]
# Every tenth step hands over a row of numbers for each tensor.

# %%
history: dict[int, dict[str, dict[str, float]]] = {}
with opt.watch(every=10, to=history.__setitem__):
    for step in range(1, 61):
        x = torch.randn(256, 64)
        loss = (model(x) - x.square().mean(1, keepdim=True)).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.4f}")

# %% [markdown]
# A healthy update is about a thousandth of its weight or less. That of one layer is several times as large, and hardly
# any gradient reaches it: its weights have grown until its tanh is flat.

# %%
last = history[max(history)]
for name, row in sorted(last.items(), key=lambda item: -item[1]["ratio"]):
    print(f"{name:10} |update| / |weight| {row['ratio']:.2e}   |gradient| {row['gradient_norm']:.2e}")
worst = max(last, key=lambda name: last[name]["ratio"])
print("look at", worst)
assert worst.startswith(wrong)
