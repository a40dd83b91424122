"""timm's registry of optimizers, with every ready-made rule in it, and ours in place of timm's own where they are one.

Rewritten are the steps of a trial, 20 in place of 200: each of the rules has eight trials.
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


def suite(plan: str, **failing: str) -> Suite:
    return Suite(
        plan=plan,
        folder="tests",
        files=("test_optim.py",),
        rewrites={r"range\(200\)": "range(20)"},
        failing=FAILING | failing,
        left_out=LEFT_OUT,
        environ={"TORCH_DEVICE": "cpu"},
    )


RATE = "theirs: one rate of 0.01 for all rules; D-Adaptation and DoG find theirs, for 1, and hardly move"
FAILING = {
    r"optgen-(dadapt-(adagrad|adan|lion|sgd)|dog)\]": RATE,
    r"optgen-(apollo-qn|kate)\]": "theirs: 20 steps at one rate, without a warmup; ApolloQN's first steps are 100 "
    "gradients, and KATE rises at first, as pytorch_optimizer's does",
    r"test_lars\[lars\]": "theirs: LARS adapts only what has weight decay unless `always_adapt` is set; ours all, as "
    "in the paper",
}
OWN = "theirs: own classes and functions, and names of rules that are no rule here"
LEFT_OUT = {
    "compiled|param_groups": OWN,
    r"\[(nadamuon|adoptw|adanw|lambc|n?larc|nlars|madgradw|rmsproptf)\]": OWN,
    "optgen-adahessian": "ours: AdaHessian is fed a Hessian at each step",
}
SUITES = [suite("fp32"), suite("int8")]
