"""Hugging Face accelerate with a generated optimizer: `prepare()` takes it like any other.

    accelerate launch examples/accelerate_loop.py --steps 20
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn

from optgen.optim import AdamW


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(32, 64), nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 32))


def run(
    folder: Path | str,
    steps: int,
    *,
    stop: int | None = None,
    resume: bool = False,
    precision: str = "no",
    every: int = 1,
) -> nn.Module:
    """Trains to `stop` (or the end), saves there, and returns the model.

    every   micro-batches per step
    """
    accelerator = Accelerator(
        mixed_precision=precision, gradient_accumulation_steps=every, cpu=not torch.cuda.is_available()
    )
    model = network()
    optimizer = AdamW(model.named_parameters(), lr=1e-2, weight_decay=0.1, plan="int8_split24")
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=steps + 1)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    first = 0
    if resume:
        accelerator.load_state(str(folder))
        first = int((Path(folder) / "step").read_text())
    last = steps if stop is None else stop
    for k in range(first * every, last * every):
        tokens, wanted = torch.randint(32, (2, 16), generator=torch.Generator().manual_seed(k)).to(accelerator.device)
        with accelerator.accumulate(model):
            with accelerator.autocast():
                loss = nn.functional.cross_entropy(model(tokens), wanted)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    accelerator.save_state(str(folder))
    (Path(folder) / "step").write_text(str(last))
    found: nn.Module = accelerator.unwrap_model(model)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--folder", default="accelerate_out")
    parser.add_argument("--precision", default="bf16", choices=("no", "bf16"))
    parser.add_argument("--every", type=int, default=1, help="micro-batches per step")
    parser.add_argument("--resume", action="store_true")
    given = parser.parse_args()
    run(given.folder, given.steps, resume=given.resume, precision=given.precision, every=given.every)
    print(f"{given.steps} steps; {given.folder} holds what --resume goes on from")


if __name__ == "__main__":
    main()
