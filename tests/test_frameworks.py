"""Training frameworks as their users use them: the examples, stopped and resumed, are bit for bit one run.

Where a framework is not installed its tests are skipped: they come with `pip install optgen[test]`, and with
`make setup`, which leaves out the loggers and servers that torchtitan asks for and nothing here needs.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import optgen
from optgen.optim import AdamW
from tests.harness import imported
from tests.training import alike

ROOT = Path(__file__).resolve().parent.parent

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is fetched: models are random, data made up


def example(name: str, *needs: str) -> ModuleType:
    for package in needs:
        pytest.importorskip(package)
    return imported(ROOT / "examples" / f"{name}.py", f"example_{name}", known=True)


def same_weights(a: nn.Module, b: nn.Module) -> bool:
    return alike([*map(Tensor.detach, a.parameters())], [*map(Tensor.detach, b.parameters())])


def bare(optimizer: Any) -> AdamW:
    """Out of the framework's wrapper."""
    found = getattr(optimizer, "optimizer", optimizer)
    assert isinstance(found, AdamW)
    return found


# -- Hugging Face Trainer ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("ready", "options"),
    [(False, {}), (True, {}), (False, {"bf16": True, "gradient_accumulation_steps": 2})],
    ids=["class", "ready", "bf16-accumulated"],
)
def test_trainer_stopped_and_resumed(tmp_path: Path, ready: bool, options: dict[str, Any]) -> None:
    hf = example("hf_trainer", "transformers", "accelerate")
    whole = hf.trainer(tmp_path / "whole", 8, ready=ready, **options)
    whole.train()
    again = hf.trainer(tmp_path / "whole", 8, ready=ready, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    assert same_weights(whole.model, again.model)
    ours, theirs = bare(whole.optimizer), bare(again.optimizer)
    assert alike(ours.state_dict(), theirs.state_dict())
    assert all(theirs.state[p]["step"] == 8 for p in again.model.parameters())
    stored = {v.dtype for kept in ours.state.values() for v in kept.values() if isinstance(v, Tensor)}
    assert torch.int8 in stored or torch.uint8 in stored  # what was resumed were codes
    assert whole.state.log_history[-1]["train_loss"] < 4.0  # log(64) is 4.16


@pytest.mark.parametrize("rule", ["schedule_free_adamw", "ema(adamw)"])
def test_trainer_evaluates_and_saves_at_the_same_step(tmp_path: Path, rule: str) -> None:
    """The Trainer calls eval() of the optimizer, saves in evaluation, and calls train() before the next step."""
    hf = example("hf_trainer", "transformers", "accelerate")
    common = dict(max_steps=4, per_device_train_batch_size=4, lr_scheduler_type="constant", report_to=[], seed=0)
    common |= dict(use_cpu=True, disable_tqdm=True)
    often = dict(eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2)

    def made(**options: Any) -> Any:
        model = hf.tiny_llama()
        opt = optgen.make(rule, model, plan="int8_split24", lr=1e-2)
        data, args = hf.Sentences(), hf.TrainingArguments(str(tmp_path), **common, **options)
        return hf.Trainer(model, args, train_dataset=data, eval_dataset=data, optimizers=(opt, None))

    plain, whole, again = made(save_strategy="no"), made(**often), made(**often)
    plain.train()
    whole.train()
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for trainer in (whole, again):
        assert not same_weights(plain.model, trainer.model)
        trainer.optimizer.train()
        assert same_weights(plain.model, trainer.model)


@pytest.mark.full
def test_states_are_away_while_trl_generates(tmp_path: Path) -> None:
    """A step is refused where TRL asks for rewards; the run is that of an optimizer whose states stay."""
    grpo = example("trl_rollouts", "trl")
    refused: list[str] = []

    def made(*callbacks: Any) -> Any:
        def reward(**given: Any) -> list[float]:
            if callbacks:
                with pytest.raises(RuntimeError) as error:
                    trainer.optimizer.step()
                refused.append(str(error.value))
            return grpo.even(given["completions"])

        trainer = grpo.trainer(str(tmp_path), 12, *callbacks)
        trainer.reward_funcs = [reward]
        trainer.train()
        return trainer

    away, stayed = made(grpo.Away()), made()
    assert len(refused) == 12 and all("call reload_states() first" in text for text in refused)
    assert same_weights(away.model, stayed.model)
    assert alike(bare(away.optimizer).state_dict(), bare(stayed.optimizer).state_dict())
    rewards = [entry["reward"] for entry in away.state.log_history if "reward" in entry]
    assert rewards[-1] > rewards[0] + 0.1


# -- accelerate -------------------------------------------------------------------------------------------
@pytest.fixture
def fresh_accelerator() -> Iterator[None]:
    """Its settings are the process's: another precision needs another start."""
    state = pytest.importorskip("accelerate.state").AcceleratorState
    state._reset_state(reset_partial_state=True)
    yield
    state._reset_state(reset_partial_state=True)


@pytest.mark.usefixtures("fresh_accelerator")
@pytest.mark.parametrize(("precision", "every"), [("no", 1), ("bf16", 2)])
def test_accelerate_stopped_and_resumed(tmp_path: Path, precision: str, every: int) -> None:
    loop = example("accelerate_loop", "accelerate")
    options = {"precision": precision, "every": every}
    whole = loop.run(tmp_path / "whole", 8, **options)
    loop.run(tmp_path / "part", 8, stop=4, **options)
    again = loop.run(tmp_path / "part", 8, resume=True, **options)
    assert same_weights(whole, again)
    assert not same_weights(whole, loop.network())


# -- Lightning --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "options", [{}, {"precision": "bf16-mixed", "accumulate_grad_batches": 2}], ids=["plain", "bf16-accumulated"]
)
def test_lightning_stopped_and_resumed(tmp_path: Path, options: dict[str, Any]) -> None:
    pl = example("lightning_module", "lightning")
    whole = pl.fit(tmp_path / "whole", 8, **options)
    again = pl.fit(tmp_path / "rest", 8, resume=tmp_path / "whole" / "step4.ckpt", **options)
    assert int(whole.seen) == int(again.seen) == 8 * options.get("accumulate_grad_batches", 1)
    assert same_weights(whole, again)
    ends = [tmp_path / folder / "step8.ckpt" for folder in ("whole", "rest")]
    states = [torch.load(path, weights_only=True)["optimizer_states"] for path in ends]
    assert alike(*states)
    assert states[0][0]["state"][0]["step"] == 8


# -- torchtitan -------------------------------------------------------------------------------------------
TITAN = ("torchtitan", "tyro", "typeguard", "docstring_parser", "spmd_types")
"""The imports of its optimizers, of which an installation by hand may lack one."""


def test_torchtitan_stopped_and_resumed() -> None:
    titan = example("torchtitan_container", *TITAN)
    whole, part, rest = titan.network(), titan.network(), titan.network()
    titan.train(whole, titan.container(whole), 0, 8)
    stopped = titan.container(part)
    titan.train(part, stopped, 0, 4)
    saved = stopped.state_dict()
    assert not any(key.endswith(("plan.None",)) for key in saved)
    resumed = titan.container(rest)
    resumed.load_state_dict(saved)
    rest.load_state_dict(part.state_dict())
    titan.train(rest, resumed, 4, 8)
    assert same_weights(whole, rest)


def test_torchtitan_makes_states_without_a_change_of_weights() -> None:
    """Its state_dict() steps once with lr = 0 and zero gradients where there are no states yet."""
    titan = example("torchtitan_container", *TITAN)
    model, fresh = titan.network(), titan.network()
    assert titan.container(model).state_dict()
    assert same_weights(model, fresh)


# -- timm -------------------------------------------------------------------------------------------------
def test_timm() -> None:
    """In a process of its own: timm needs torchvision, beside which nothing else can be imported where torch is a
    CPU build and torchvision is not."""
    from tests import with_timm

    missing = with_timm.missing()
    if missing:
        pytest.skip(f"could not import {missing!r}")
    done = subprocess.run(
        [sys.executable, "-m", "tests.with_timm"], capture_output=True, text=True, timeout=240, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines() == [f"ok {name}" for name in with_timm.CHECKS]


# -- plain torch ------------------------------------------------------------------------------------------
def test_gradient_release_in_plain_torch() -> None:
    release = example("gradient_release")
    (a, opt_a), (b, opt_b) = (release.train(4, released=way) for way in (True, False))
    assert same_weights(a, b)
    assert opt_a.state_dict()["state"].keys() == opt_b.state_dict()["state"].keys()
    for rule in release.RULES:
        model, optimizer = release.train(3, accumulate=3, rule=rule)
        assert all(p.grad is None and optimizer.state[p]["step"] == 3 for p in model.parameters())


def test_states_that_leave_for_rollouts_change_no_bit() -> None:
    loop = example("rollout_loop")
    (a, rewards), (b, same) = (loop.train(40, away) for away in (True, False))
    assert same_weights(a, b) and rewards == same
    assert rewards[-1] > 5 * rewards[0]


@pytest.mark.full
@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
def test_data_parallel_by_torchrun(way: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(ROOT / "examples" / "distributed.py"), "--steps", "3", "--way", way]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("2 ranks, the same weights")
