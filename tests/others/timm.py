"""timm's registry of optimizers, with every ready-made rule in it, and ours in place of timm's own where they are one.

Rewritten are the steps of a trial, 20 in place of 200, but for the rules that need them: each rule has eight trials.
The optimizer whose rates timm's schedules set is ours, too.
"""

import importlib
import os
import sys
from typing import Any

import torch

import optgen
from optgen.by_name import class_of
from optgen.driver.load import find_plan
from tests.others import Suite
from tests.with_timm import add_torchvision

# fmt: off
NAMES: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("sgd", {"nesterov": True}), "momentum": ("sgd", {}), "sgdw": ("sgdw", {"nesterov": True}),
    "nadamw": ("nadam", {"decoupled_weight_decay": True}), "radamw": ("radam", {"decoupled_weight_decay": True}),
    "radabelief": ("adabelief", {"rectify": True}), "adafactorbv": ("adafactor", {}),
    "adafactor": ("adafactor_paper", {}), "kron": ("psgd_kron", {}), "adamwlegacy": ("adamw", {}),
    "nmuon": ("muon", {}), "muon": ("muon", {"nesterov": False}), "cadamw": ("cautious_adamw", {}),
    "clion": ("cautious_lion", {}), "cadamp": ("cautious(adamp)", {}), "csgdp": ("cautious(sgdp)", {}),
    "csgdw": ("cautious(sgdw)", {}),
    **{name: (name, {}) for name in (
        "adabelief", "adadelta", "adagrad", "adam", "adamax", "adamc", "adamp", "adamuon", "adamw", "adan", "adopt",
        "lamb", "laprop", "lars", "lion", "madgrad", "mars", "nadam", "novograd", "radam", "rmsprop", "sgdp",
    )},
}
# fmt: on
"""timm's name -> our rule, and options by which it is the same."""


def install(plan: str) -> None:
    """Register all rules, under a plan that stores even the smallest tensors in its codes."""
    sys.path.insert(0, os.environ["OPTGEN_OTHERS_CHECKOUT"])
    add_torchvision()
    registry: Any = importlib.import_module("timm.optim._optim_factory").default_registry
    registry._optimizers.clear()
    torch.manual_seed(0)
    register = importlib.import_module("optgen.integrations.timm").register
    stored = find_plan(plan).but(name=f"{plan}_of_all", small_numel=0)
    named = NAMES | {f"optgen-{rule}": (rule, {}) for rule in optgen.list_rules()}
    for name, (rule, options) in named.items():
        register(class_of(rule, stored), name, **options)


LONG = "dadapt-adagrad or dadapt-adan or dadapt-lion or dadapt-sgd or optgen-dog or apollo-qn or optgen-kate"
"""Rules that begin slowly, or far off, and are tried with timm's own number of steps."""
FAILING = {
    r"\[lars\]": "theirs: LARS adapts only what has weight decay unless `always_adapt` is set; the paper's adapts all",
}
LONG_FAILING = {
    "dadapt|dog": "theirs: one rate of 0.01 for all rules; D-Adaptation and DoG find theirs, for 1, and hardly move in "
    "200 steps, as pytorch_optimizer's D-Adaptation does",
    "apollo-qn": "theirs: a rate of 0.01 without a warmup; ApolloQN's first steps are 100 gradients, and it diverges",
}
OWN = "theirs: own classes and functions, and names of rules that are no rule here"
LEFT_OUT = {
    "compiled|param_groups": OWN,
    r"\[(nadamuon|adoptw|adanw|lambc|n?larc|nlars|madgradw|rmsproptf)\]": OWN,
    "optgen-adahessian": "ours: AdaHessian is fed a Hessian at each step",
}
FILES_LEFT_OUT = {
    "theirs: models, layers and data, without an optimizer that could be ours": "test_checkpoint_loading.py "
    "test_data.py test_dataset_info.py test_factory.py test_hub.py test_layers.py test_layers_drop.py "
    "test_layers_pool.py test_models.py test_naflex_dataset.py test_scheduled_sampler.py test_task.py test_utils.py",
}
CPU = {"TORCH_DEVICE": "cpu"}
TRIALS = "test_optim.py", "-k"
SUITES = [
    *(
        Suite(plan, "tests", files, rewrites, failing, left_out, CPU, kind)
        for plan in ("fp32", "int8")
        for kind, files, rewrites, failing, left_out in (
            ("", (*TRIALS, f"not ({LONG})"), {r"range\(200\)": "range(20)"}, FAILING, LEFT_OUT),
            ("200 steps", (*TRIALS, LONG), {}, LONG_FAILING, {}),
        )
    ),
    Suite(
        plan="int8",
        folder="tests",
        files=("test_scheduler.py",),
        rewrites={r"torch\.optim\.SGD": "__import__('optgen').optim.SGD"},
        kind="schedules",
    ),
]
