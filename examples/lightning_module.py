"""Lightning with a generated optimizer: it is what `configure_optimizers` returns.

    python examples/lightning_module.py --steps 20
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor, nn

from optgen.optim import AdamW


class Model(lightning.LightningModule):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Embedding(32, 64), nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 32))
        # Lightning does not bring a plain loader back to where it stood.  So that a run that goes on sees the same data
        # as one that was never stopped, they follow from a count that is saved with the weights.
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        tokens = (batch + self.seen) % 32
        self.seen += 1
        return nn.functional.cross_entropy(self.net(tokens), (3 * tokens + 1) % 32)

    def configure_optimizers(self) -> Any:
        optimizer = AdamW(self.named_parameters(), lr=1e-2, weight_decay=0.1, plan="int8_split24")
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def fit(folder: Path | str, steps: int, *, resume: Path | str | None = None, **options: Any) -> Model:
    """The trained model; step4.ckpt, step8.ckpt ... are in the folder.  `options` go to the Trainer."""
    model = Model()
    given = dict(
        accelerator="auto" if torch.cuda.is_available() else "cpu", devices=1, max_steps=steps, max_epochs=-1,
        gradient_clip_val=1.0, default_root_dir=folder, logger=False,
        callbacks=[
            lightning.pytorch.callbacks.ModelCheckpoint(
                folder, "step{step}", every_n_train_steps=4, save_top_k=-1, auto_insert_metric_name=False
            )
        ],
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer = lightning.Trainer(**(given | options))
    data: Any = torch.arange(64).repeat(4)
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=64), ckpt_path=resume, weights_only=True)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--folder", default="lightning_out")
    parser.add_argument("--resume", help="a checkpoint to go on from")
    given = parser.parse_args()
    model = fit(given.folder, given.steps, resume=given.resume)
    print(sorted(Path(given.folder).glob("*.ckpt")), int(model.seen), "batches")


if __name__ == "__main__":
    main()
