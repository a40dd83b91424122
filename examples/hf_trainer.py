"""Hugging Face Trainer with a generated optimizer: `optimizer_cls_and_kwargs=` is all that changes, as in TRL.

    python examples/hf_trainer.py --steps 20
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from optgen.integrations.transformers import optimizer_cls_and_kwargs
from optgen.optim import AdamW


class Sentences(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Made-up text: each token follows from the one before."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(16) * (1 + i % 3) + i) % 64
        return {"input_ids": tokens, "labels": tokens}


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=4, max_position_embeddings=32,
        )
    )  # fmt: skip


def trainer(folder: Path | str, steps: int, *, ready: bool = False, **options: Any) -> Trainer:
    """ready   make the optimizer and the schedule here and hand them over (`optimizers=`), instead of class and options

    options   further TrainingArguments
    """
    model = tiny_llama()
    given = dict(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=4, save_steps=4, learning_rate=1e-2,
        lr_scheduler_type="cosine", warmup_steps=2, max_grad_norm=1.0, weight_decay=0.1, report_to=[],
        logging_steps=1000, use_cpu=not torch.cuda.is_available(), disable_tqdm=True, seed=0,
    )  # fmt: skip
    arguments = TrainingArguments(**(given | options))
    if ready:
        optimizer = AdamW(model.named_parameters(), lr=1e-2, weight_decay=0.1, plan="int8_split24")
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
        return Trainer(model, arguments, train_dataset=Sentences(), optimizers=(optimizer, schedule))
    # The Trainer makes the groups with and without weight decay; the model gives their parameters names.
    options = {"betas": (0.9, 0.95), "overrides": {"*embed*": "fp32"}}
    chosen = optimizer_cls_and_kwargs(arguments, "adamw", plan="int8_split24", model=model, **options)
    return Trainer(model, arguments, train_dataset=Sentences(), optimizer_cls_and_kwargs=chosen)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--folder", default="hf_out")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in the folder")
    given = parser.parse_args()
    made = trainer(given.folder, given.steps)
    print(made.train(resume_from_checkpoint=given.resume or None).metrics)
    optimizer = made.optimizer.optimizer if hasattr(made.optimizer, "optimizer") else made.optimizer
    print(optimizer.memory())


if __name__ == "__main__":
    main()
