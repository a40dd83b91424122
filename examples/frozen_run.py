# %% [markdown]
# # Is my optimizer frozen?
# torch's AdamW on a model in bf16 at a small rate: the loss stands still, and nothing says why. `optgen.diagnose` reads
# the weights and states of any optimizer between two steps. Runs on a CPU in seconds.

# %%
import torch
from torch import nn

import optgen

torch.manual_seed(0)
inputs, model = torch.randn(512, 64).bfloat16(), nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 1))
targets, model = inputs.float().square().mean(1, keepdim=True), model.to(torch.bfloat16)
first = {name: p.clone() for name, p in model.state_dict().items()}


def train(opt: torch.optim.Optimizer, steps: int = 200) -> float:
    """Return the loss after some steps."""
    for _ in range(steps):
        opt.zero_grad()
        loss = (model(inputs).float() - targets).square().mean()
        loss.backward()
        opt.step()
    return loss.item()


# %%
opt: torch.optim.Optimizer = torch.optim.AdamW(model.named_parameters(), lr=1e-5)
frozen = train(opt)
report = optgen.diagnose(opt)
print(f"loss {frozen:.5f}\n{report}")

# %% [markdown]
# The report's last line mends it: the same rate, 5 bytes per parameter instead of 6.

# %%
model.load_state_dict(first)
opt = optgen.make("adamw", model, lr=1e-5, weight_decay=0.01, plan="int8_split24")
mended = train(opt)
print(f"loss {mended:.5f}\n{optgen.diagnose(opt)}")
assert report.findings and not optgen.diagnose(opt).findings and mended < frozen
