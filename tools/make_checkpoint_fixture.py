"""Write the checkpoint that tests keep of one format version, or of one form of the file:

    python tools/make_checkpoint_fixture.py tests/cases/checkpoints/format-4.pt
    python tools/make_checkpoint_fixture.py tests/cases/checkpoints/file-zip.pt

Run it once when the format changes, at the last commit of the old format; the file is never written again. The first
holds state dicts of a few classes and plans after two steps, and a digest of the full weights two steps later; the
second is of `save_checkpoint`, with the digest in `extra`.
"""

from __future__ import annotations

import copy
import hashlib
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from optgen import cast_model, save_checkpoint
from optgen.optim import CAME, AdamW

CASES = (
    ("AdamW", "int8_split24", torch.bfloat16, {"w": (52, 79), "b": (7,)}),
    ("AdamW", "fp32_master", torch.bfloat16, {"w": (3, 5), "b": (7,)}),
    ("AdamW", "fp32", torch.float32, {"w": (3, 5), "b": (7,)}),
    ("CAME", "int8_split24", torch.bfloat16, {"w": (52, 79)}),
)
CLASSES = {"AdamW": AdamW, "CAME": CAME}


def optimizer(case: tuple[Any, ...]) -> tuple[Any, dict[str, nn.Parameter]]:
    name, plan, dtype, shapes = case
    generator = torch.Generator().manual_seed(0)
    params = {k: nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for k, s in shapes.items()}
    return CLASSES[name](params.items(), lr=1e-2, plan=plan, seed=5, backend="reference"), params


def train(opt: Any, params: dict[str, nn.Parameter], steps: Iterable[int]) -> None:
    for step in steps:
        for i, p in enumerate(params.values()):
            noise = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * step + i))
            p.grad = noise.to(p.dtype)
        opt.step()


def digest(opt: Any) -> str:
    """Return the digest of the bits of the full weights."""
    found = hashlib.sha256()
    for name, weight in opt.master_weights().items():
        found.update(str(name).encode() + weight.numpy().tobytes())
    return found.hexdigest()


class Model(nn.Module):
    """A tied weight, a buffer, and a weight without a gradient, which keeps the low bits of its cast."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(7)
        self.w, self.b, self.late = (nn.Parameter(torch.randn(s, generator=draw)) for s in ((52, 79), (7,), (5, 6)))
        self.tied = self.w
        self.register_buffer("count", torch.tensor(3))


def run() -> tuple[Model, Any, dict[str, nn.Parameter]]:
    """Return a model, its optimizer, and the parameters that get gradients."""
    model = cast_model(Model(), torch.bfloat16)
    opt = AdamW(model.named_parameters(), lr=1e-2, plan="int8_split24", seed=5, backend="reference")
    return model, opt, {"w": model.w, "b": model.b}


def write_file(path: str) -> None:
    _, opt, params = run()
    train(opt, params, range(4))
    after = digest(opt)
    model, opt, params = run()
    train(opt, params, range(2))
    extra = {"after": after, "tuple": (1, None, [True, float("inf")]), ("key", 2): torch.arange(3), 5: {}}
    save_checkpoint(path, opt, model, extra)


def main(path: str) -> None:
    made = {}
    for case in CASES:
        opt, params = optimizer(case)
        train(opt, params, range(2))
        saved = {"optimizer": copy.deepcopy(opt.state_dict())}
        saved["model"] = {name: p.detach().clone() for name, p in params.items()}
        train(opt, params, range(2, 4))
        made[f"{case[0]} {case[1]}"] = saved | {"after": digest(opt)}
    torch.save(made, path)


if __name__ == "__main__":
    (write_file if "/file-" in sys.argv[1] else main)(sys.argv[1])
