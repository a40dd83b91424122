"""TRL's GRPO on one device: a callback sends the states away while the model generates, and back before the step.

    pip install trl
    python examples/trl_rollouts.py --steps 40
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from optgen.optim import AdamW


class Away(TrainerCallback):
    """The calls around a step: TRL generates, scores and differentiates between the two."""

    def on_step_begin(self, *_: Any, optimizer: Any, **__: Any) -> None:
        optimizer.optimizer.offload_states()  # accelerate's wrapper holds optgen's; torch.cuda.empty_cache() as well
        self.away = optimizer.optimizer.memory().places

    def on_pre_optimizer_step(self, *_: Any, optimizer: Any, **__: Any) -> None:
        optimizer.optimizer.reload_states()
        self.back = optimizer.optimizer.memory().places


def even(completions: list[str], **_: Any) -> list[float]:
    return [sum(int(word) % 2 == 0 for word in text.split()) / 8 for text in completions]


def trainer(folder: str, steps: int, *callbacks: TrainerCallback) -> GRPOTrainer:
    """Return a trainer of a small model, whose words are numbers, for even ones."""
    words = Tokenizer(models.WordLevel({str(n): n for n in range(64)}, "0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1", unk_token="0")
    sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, eos_token_id=1, pad_token_id=0, **sizes)).bfloat16()
    optimizer = AdamW(model.named_parameters(), lr=3e-3, plan="int8_split24")
    config = GRPOConfig(
        folder, max_steps=steps, per_device_train_batch_size=32, num_generations=8, max_completion_length=8,
        lr_scheduler_type="constant", logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(), seed=0,
    )  # fmt: skip
    prompts = Dataset.from_dict({"prompt": [str(n) for n in range(2, 64)]})
    return GRPOTrainer(
        model, even, config, prompts, processing_class=tokenizer, optimizers=(optimizer, None), callbacks=[*callbacks]
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    states = Away()
    made = trainer("grpo_out", parser.parse_args().steps, states)
    before = [p.detach().clone() for p in made.model.parameters()]
    made.train()
    moved = [float((p != old).float().mean()) for p, old in zip(made.model.parameters(), before, strict=True)]
    print(f"bytes by device: {states.away} while the model generates, {states.back} for the step")
    rewards = [entry["reward"] for entry in made.state.log_history if "reward" in entry]
    print(f"reward {rewards[0]:.2f} at first, {rewards[-1]:.2f} at the end")
    print(f"at least {min(moved):.0%} of each tensor moved")
