# %% [markdown]
# # Your rule in twenty lines
#
# A notebook in jupytext's percent format: `jupytext --to notebook examples/your_rule.py`, or `python` runs it as it
# stands. On a CPU it takes less than a minute.
#
# ## The rule
#
# A rule is a function: after `p` (the weight) and `g` (the gradient) come its states, after `*` its arguments. This one
# moves by `lr` where a gradient keeps its sign, and by less where it does not.

# %%
import torch
from torch import nn

import optgen
from optgen.lang import hyper, nonneg, optimizer, state


@optimizer(cite="an example of this repository")
def signed_momentum(
    p, g, average=state(), size=state(nonneg), *,
    lr=hyper(1e-3, ge=0),
    beta=hyper(0.9, ge=0, lt=1),
    eps=hyper(1e-12, gt=0),
    weight_decay=hyper(0.1, ge=0),
):
    average = beta * average + (1 - beta) * g
    size = beta * size + (1 - beta) * abs(g)
    p = p * (1 - lr * weight_decay)
    p = p - lr * average / (size + eps)
    return p, average, size


# %% [markdown]
# ## An optimizer from it
#
# `optgen.compile` generates and loads a `torch.optim.Optimizer`. The plan says how states are stored: in 8 bits here.

# %%
Mine = optgen.compile(signed_momentum, plan="int8_split24")

# %% [markdown]
# ## Training
#
# A small network learns to tell points inside of a ring from those outside, once in 8 bits and once in fp32.

# %%
generator = torch.Generator().manual_seed(0)
points = torch.randn(2048, 2, generator=generator)
inside = (points.norm(dim=1) < 1.2).long()


def train(make, dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 2)).to(dtype)
    opt = make(model.parameters())
    for _ in range(200):
        loss = nn.functional.cross_entropy(model(points.to(dtype)).float(), inside)
        loss.backward()
        opt.step()
        opt.zero_grad()
    return loss.item(), opt


small, opt = train(lambda params: Mine(params, lr=2e-3), torch.bfloat16)
plain, _ = train(lambda params: Mine(params, lr=2e-3, plan="fp32"), torch.float32)
print(f"loss after 200 steps: {small:.3f} in 8 bits, {plain:.3f} in fp32")
assert max(small, plain) < 0.2

# %% [markdown]
# ## What it keeps

# %%
print(opt.memory())

# %% [markdown]
# ## The bounds of its storage
#
# In a terminal, `optgen explain specs/signed_momentum.py` shows error bounds, memory traffic and the reason for the
# number of passes; `optgen build` writes the generated code into your project, without the compiler.
