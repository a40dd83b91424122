"""`optgen.integrations` in the frameworks themselves: AdamW, Muon and CAME, bit for bit as they are by themselves.

axolotl, jsonargparse (of LightningCLI) and Megatron are in no environment that `make setup` makes;
`PYTHONPATH=FOLDER make test ARGS=tests/test_integrations.py` tests them too, from a folder of `pip install --target`.
"""

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import optgen
from optgen.by_name import class_of
from optgen.integrations import framework
from tests.oracles import optional
from tests.test_frameworks import TITAN, example, same_weights

ROOT = Path(__file__).resolve().parents[1]
RULES = ("adamw", "muon", "came")
OPTIONS: dict[str, Any] = {"lr": 1e-2, "plan": "int8_split24"}


def module(name: str, *needs: str) -> Any:
    for package in needs:
        pytest.importorskip(package, exc_type=ImportError)
    return importlib.import_module(f"optgen.integrations.{name}")


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 8))


def train(model: nn.Module, optimizer: Any, steps: int = 3) -> None:
    made = torch.Generator().manual_seed(1)
    for _ in range(steps):
        model(torch.randn(16, 64, generator=made)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_as_by_itself(model: nn.Module, rule: str, **options: Any) -> None:
    """Weights after training are those of the rule's class, made by hand of parameters in their names."""
    other = net()
    train(other, class_of(rule)(other.named_parameters(), **{**OPTIONS, **options}))
    assert same_weights(model, other) and not same_weights(model, net())


@pytest.mark.parametrize("rule", [*RULES, {"lm_head": "muon", "*": "adamw"}], ids=str)
@pytest.mark.parametrize("way", ["transformers", pytest.param("trl", marks=pytest.mark.full), "axolotl"])
def test_trainers(tmp_path: Path, rule: Any, way: str) -> None:
    ours = module("axolotl" if way == "axolotl" else "transformers", "transformers", "accelerate", way)
    hf = example("hf_trainer", "transformers", "accelerate")
    given = dict(
        output_dir=str(tmp_path), learning_rate=3e-3, weight_decay=0.1, max_steps=2, use_cpu=True, report_to=[],
        disable_tqdm=True, per_device_train_batch_size=4, max_grad_norm=0.0, lr_scheduler_type="constant", seed=0,
        save_strategy="no",
    )  # fmt: skip
    transformers, model = importlib.import_module("transformers"), hf.tiny_llama()
    package = importlib.import_module("trl" if way == "trl" else "transformers")
    config, kind, extra = transformers.TrainingArguments, transformers.Trainer, {}
    data: Any = hf.Sentences()
    if way == "trl":
        config, kind = package.SFTConfig, package.SFTTrainer
        words = importlib.import_module("tokenizers").models.WordLevel({str(n): n for n in range(64)}, "0")
        made = importlib.import_module("tokenizers").Tokenizer(words)
        special = dict(pad_token="0", eos_token="1", unk_token="0")
        extra = {"processing_class": transformers.PreTrainedTokenizerFast(tokenizer_object=made, **special)}
        rows = [{"input_ids": data[i]["input_ids"].tolist()} for i in range(len(data))]
        data = importlib.import_module("datasets").Dataset.from_list(rows)
    args = config(**given)
    chosen = {} if way == "axolotl" else {
        "optimizer_cls_and_kwargs": ours.optimizer_cls_and_kwargs(args, rule, plan="int8_split24", model=model)
    }  # fmt: skip
    trainer = kind(model, args=args, train_dataset=data, **chosen, **extra)
    if way == "axolotl":
        settings = ours.OptgenArgs(optgen={"rule": rule, "plan": "int8_split24"})
        assert ours.OptgenPlugin().get_input_args() == "optgen.integrations.axolotl.OptgenArgs"
        ours.OptgenPlugin().post_trainer_create(settings, trainer)
    before = [p.detach().clone() for p in model.parameters()]
    trainer.train()
    made = trainer.optimizer.optimizer
    names = ["Muon", "AdamW"] if isinstance(rule, dict) else [class_of(rule).__name__]
    assert [type(part).__name__ for part in getattr(made, "parts", {0: made}).values()] == names
    assert {(g["lr"], g["plan"]) for g in made.param_groups} == {(3e-3, "int8_split24")}
    assert {g["weight_decay"] for g in made.param_groups} == ({0.1} if isinstance(rule, dict) else {0.1, 0.0})
    moved = [not torch.equal(a, b) and b.isfinite().all() for a, b in zip(before, model.parameters(), strict=True)]
    assert all(moved)


def test_settings_of_adam_reach_rules_that_have_them(tmp_path: Path) -> None:
    ours = module("transformers", "transformers")
    import transformers

    plain = transformers.TrainingArguments(str(tmp_path), report_to=[])
    assert ours.optimizer_cls_and_kwargs(plain, "lion") == (optgen.optim.Lion, {"lr": 5e-5})  # type: ignore[attr-defined]
    changed = transformers.TrainingArguments(str(tmp_path), report_to=[], adam_beta2=0.95)
    assert ours.optimizer_cls_and_kwargs(changed)[1] == {"lr": 5e-5, "betas": (0.9, 0.95), "eps": 1e-8}
    for rule in ("came", {"*": "adamw"}):
        with pytest.raises(ValueError, match="take adam_beta2"):
            ours.optimizer_cls_and_kwargs(changed, rule)
    decayed = transformers.TrainingArguments(str(tmp_path), report_to=[], weight_decay=0.1)
    with pytest.raises(ValueError, match=r"Rprop has no weight decay, got weight_decay=0\.1 of TrainingArguments"):
        ours.optimizer_cls_and_kwargs(decayed, "rprop")


@pytest.mark.parametrize("rule", RULES)
def test_torchtitan_builds_from_a_configuration(rule: str) -> None:
    titan, model = module("torchtitan", *TITAN), net()
    built = titan.config(rule, **OPTIONS).build(model_parts=[model])
    assert type(built) is titan.Container
    train(model, built)
    assert_as_by_itself(model, rule)


@pytest.mark.parametrize("name", ["AdamW", "Muon", "CAME"])
def test_lightning_reads_the_class_from_a_file(tmp_path: Path, name: str) -> None:
    for package in ("jsonargparse", "typeshed_client"):  # jsonargparse[signatures]
        pytest.importorskip(package)
    pl = pytest.importorskip("lightning.pytorch")
    cli = importlib.import_module("lightning.pytorch.cli")

    class Lit(pl.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, batch: torch.Tensor, _: int) -> Any:
            return self.net(batch).square().mean()

        def train_dataloader(self) -> Any:
            made = torch.Generator().manual_seed(1)
            batches: Any = [torch.randn(16, 64, generator=made) for _ in range(3)]
            return torch.utils.data.DataLoader(batches, batch_size=None)

    text = "optimizer:\n  class_path: optgen.optim.{}\n  init_args: {{lr: 1.0e-2, plan: int8_split24}}\n"
    (tmp_path / "run.yaml").write_text(text.format(name))
    settings = dict(accelerator="cpu", logger=False, max_epochs=1, enable_progress_bar=False, barebones=True)
    settings.pop("logger")
    args = ["fit", "--config", str(tmp_path / "run.yaml")]
    made = cli.LightningCLI(Lit, save_config_callback=None, trainer_defaults=settings, args=args)
    (optimizer,) = made.trainer.optimizers
    assert type(optimizer).__name__ == name and optimizer.param_groups[0]["plan"] == "int8_split24"
    other = net()
    train(other, class_of(name.lower())(other.parameters(), **OPTIONS))  # Lightning hands over no names
    assert same_weights(made.model.net, other)


@pytest.mark.parametrize("rule", RULES)
def test_emerging_optimizers_finds_the_name(rule: str) -> None:
    registry = optional("emerging_optimizers.registry")
    ours, model = module("emerging_optimizers"), net()
    name = ours.register(rule, f"tested_{rule}", plan="int8_split24")
    train(model, registry.get_configured_optimizer_cls(name, lr=1e-2)(model.named_parameters()))
    assert_as_by_itself(model, rule)
    registry._OPTIMIZERS.pop(name)


@pytest.mark.parametrize("name", ["AdamW", "Muon", "CAME"])
def test_megatron_makes_the_class_of_an_entry(name: str) -> None:
    """The block of docs/migration.md, with another class."""
    pytest.importorskip("emerging_optimizers.registry")
    table, model = pytest.importorskip("megatron.core.optimizer.emerging_optimizers"), net()
    (block,) = re.findall(r"```python\n(from megatron.*?)```", (ROOT / "docs/migration.md").read_text(), re.DOTALL)
    exec(block.replace("optim.Muon", f"optim.{name}"), {"optgen": optgen})
    config = importlib.import_module("megatron.core.optimizer.optimizer_config").OptimizerConfig(lr=1e-2)
    groups = [{"params": list(model.parameters())}]
    train(model, table._create_emerging_optimizer(config, groups, "optgen_muon", [model], None)[0])
    table._EMERGING_OPTIMIZERS.pop("optgen_muon")
    other = net()
    train(other, getattr(optgen.optim, name)(other.parameters(), weight_decay=config.weight_decay, **OPTIONS))
    assert same_weights(model, other)


def test_a_missing_framework_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchtitan", None)
    for name in [name for name in sys.modules if name.startswith("torchtitan.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "optgen.integrations.torchtitan", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"torchtitan is missing or incomplete .*: pip install torchtitan"):
        importlib.import_module("optgen.integrations.torchtitan")
    with pytest.raises(ModuleNotFoundError, match="pip install emerging-optimizers"):
        framework("emerging_optimizers.no_such")
