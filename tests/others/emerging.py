"""Emerging-Optimizers' names, made of optgen: its own tests then judge our rules of matrices, on one rank and on four.

Rewritten in its files are the flags of a command line, the words of errors, and the name of a state.
"""

import importlib
import inspect
import os
import sys
import typing
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import optgen
from optgen import lang
from optgen.driver.load import find_spec
from optgen.lang import Spec, hyper, hyperball, maximum, norm, optimizer, policies, shape_flag, sqrt, state, wrapper
from optgen.runtime.records import series
from optgen.runtime.reference import matrices
from tests.others import Suite

Options = dict[str, Any]
PACKAGE = "emerging_optimizers"
IGNORED = ("fp32_matmul_prec", "qr_fp32_matmul_prec", "use_syrk", "power_iter_steps", "hyperball_radius")
"""Options of how matrices are multiplied, and what is as by default."""


# -- rules
@wrapper(cite="Emerging-Optimizers: weight_decay_method='l2'")
def l2_decayed(rule, p, g, *, method_decay=hyper(0.0, ge=0)):
    """A rule of the gradient plus method_decay times the weight."""
    return rule(p, g + method_decay * p)


@wrapper(cite="Emerging-Optimizers: weight_decay_method='independent'")
def independent_decayed(rule, p, g, *, method_decay=hyper(0.0, ge=0)):
    """A rule of weights that shrink by method_decay first, whatever lr is."""
    return rule(p * (1 - method_decay), g)


@wrapper(cite="Emerging-Optimizers: frob_normalize")
def norm_kept(rule, p, g):
    """A rule after whose steps each tensor has the norm that it had before."""
    new = rule(p, g)
    return new * (norm(p) / maximum(norm(new), 1e-30))


def newest(factor, basis, known):
    turn = lang.orthogonal_iteration(factor, basis.T @ basis, known)
    turn = turn @ lang.sorting(turn.T @ factor @ turn)
    return (turn, *policies.rotated(factor, basis, turn))


@optimizer(cite="Emerging-Optimizers: tests/soap_reference.py", matrix="heads")
def soap_reference(
    p,
    g,
    t,
    exp_avg=state(),
    exp_avg_sq=state(lang.nonneg),
    left=lang.matrix_state("rows", lang.symmetric, when="matrix"),
    basis_left=lang.matrix_state("rows", lang.orthogonal, when="matrix", init="identity"),
    right=lang.matrix_state("columns", lang.symmetric, when="matrix"),
    basis_right=lang.matrix_state("columns", lang.orthogonal, when="matrix", init="identity"),
    *,
    lr=hyper(3e-3, ge=0),
    betas=hyper((0.9, 0.95), ge=0, lt=1),
    shampoo_beta=hyper(0.95, ge=0, lt=1),
    eps=hyper(1e-8, gt=0),
    weight_decay=hyper(0.01, ge=0),
    matrix=shape_flag(lambda shape: len(shape) >= 2),
):
    """SOAP that decays first, moves at once and in bases of the newest gradient, and turns no second moments."""
    if not matrix:
        p, exp_avg, exp_avg_sq = policies.adamw_step(p, g, t, exp_avg, exp_avg_sq, lr, betas, eps, weight_decay)
        return p, exp_avg, exp_avg_sq, left, basis_left, right, basis_right
    beta1, beta2 = betas
    p = policies.decoupled(p, lr, weight_decay)
    turned = basis_left.T @ g @ basis_right
    left = shampoo_beta * left + (1 - shampoo_beta) * lang.gram(turned)
    right = shampoo_beta * right + (1 - shampoo_beta) * lang.gram(turned.T)
    turn_left, left, basis_left = newest(left, basis_left, t > 1)
    turn_right, right, basis_right = newest(right, basis_right, t > 1)
    turned = turn_left.T @ turned @ turn_right
    exp_avg = beta1 * (turn_left.T @ exp_avg @ turn_right) + (1 - beta1) * turned
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * turned * turned
    update = basis_left @ (exp_avg / (sqrt(exp_avg_sq) + eps)) @ basis_right.T
    p = p - lr * sqrt(1 - beta2**t) / (1 - beta1**t) * update
    return p, exp_avg, exp_avg_sq, left, basis_left, right, basis_right


def theirs(name: str) -> Any:
    return importlib.import_module(f"{PACKAGE}.{name}")


def rounds(kind: str, steps: int, custom: Any = None) -> Any:
    """Return the coefficients of a number of rounds; of a set that has a name here, that name."""
    utils = theirs("orthogonalized_optimizers.muon_utils")
    if name := {"simple": "jordan", "deepseekv4": "deepseek"}.get(kind):
        return name
    mode = "repeat_last" if kind in ("polar_express", "cans") else "cycle"
    found = utils.get_coefficient_iterator(max(steps, 1), custom or utils._COEFFICIENT_SETS[kind], mode)
    return [tuple(map(float, triple)) for triple in found]


def in_rounds(given: Options) -> Options:
    steps = given.pop("num_ns_steps", 5)
    coefficients = rounds(given.pop("coefficient_type", "quintic"), max(steps, 0))
    return given | {"ns_steps": steps, "ns_coefficients": coefficients}


def scaled(given: Options) -> Options:
    """Translate scales of a step: a factor is one of lr, by which the decay is divided."""
    mode = given.pop("scale_mode", "spectral")
    factor = given.pop("extra_scale_factor", 1.0) * (5 if mode == "spectral" else 1)  # Moonlight's scale has 0.2
    given["lr"], given["weight_decay"] = given["lr"] * factor, given["weight_decay"] / factor
    options = {"spectral": {"match_rms_adamw": True}, "unit_rms_norm": {"scale_floor": 0.0}, "shape_scaling": {}}
    return in_rounds(given | options[mode])


def scion(given: Options) -> Options:
    given["momentum"], given["scale"] = 1 - given.pop("momentum", 0.95), given.pop("spectral_radius", 1.0)
    return in_rounds(given)


def by_shape(given: Options) -> Options:
    return scaled({"scale_mode": "shape_scaling"} | given)


def renamed(**names: str) -> Callable[[Options], Options]:
    return lambda given: {names.get(name, name): value for name, value in given.items()}


def adaptive(params: Any, *, moment2_method: str = "adamuon", **given: Any) -> Any:
    """Make AdaMuon or NorMuon; `momentum` is the first of NorMuon's betas."""
    if moment2_method == "normuon":
        given["betas"] = given.pop("momentum"), given.pop("beta2", 0.95)
        given.pop("nesterov", None)
    return Made(moment2_method, in_rounds, scale_mode="spectral", beta2=0.95)(params, **given)


class Made:
    """A class of theirs: takes its arguments, and makes an optimizer of ours.

    only   options that are no option here, with the value that the rule has
    """

    def __init__(self, rule: Any, translate: Callable[[Options], Options] = renamed(), **only: Any) -> None:
        self.rule, self.translate, self.only = rule, translate, only

    def __call__(self, params: Any, **given: Any) -> Any:
        given = {"lr": 3e-4, "weight_decay": 0.01} | {k: v for k, v in given.items() if k not in IGNORED}
        for name, value in self.only.items():
            if given.pop(name, value) != value:
                raise ValueError(f"{name} is no option here")
        rule, own = self.rule if isinstance(self.rule, Spec) else find_spec(self.rule), {}
        if (method := given.pop("weight_decay_method", "decoupled")) != "decoupled":
            rule = {"l2": l2_decayed, "independent": independent_decayed}[method](rule)
            own, given = {"method_decay": given["weight_decay"]}, given | {"weight_decay": 0.0}
        if given.pop("frob_normalize", False):
            rule = norm_kept(rule)
        return optgen.compile(rule, "fp32")(params, **own, **self.translate(given))


EVERY_STEP = {"betas": (0.9, 0.95), "precondition_frequency": 1}
FIXED = {"correct_bias": True, "use_kl_shampoo": False, "correct_shampoo_beta_bias": False}
SOAP = Made("soap", lambda given: EVERY_STEP | given, **FIXED)
CLASSES: dict[str, dict[str, Any]] = {
    "orthogonalized_optimizers.muon": {"Muon": Made("muon", lambda given: scaled({"nesterov": False} | given))},
    "orthogonalized_optimizers.muon_hyperball": {"MuonHyperball": Made(hyperball(find_spec("muon")), by_shape)},
    "orthogonalized_optimizers.scion": {"Scion": Made("scion", scion, weight_decay=0.01)},
    "orthogonalized_optimizers.polargrad": {"PolarGrad": Made("polargrad", by_shape)},
    "orthogonalized_optimizers.adaptive_muon": {"AdaptiveMuon": adaptive},
    "psgd.psgd": {"PSGDPro": Made("psgd_kron")},
    "scalar_optimizers": {
        "Lion": Made("lion"),
        "LaProp": Made("laprop", correct_bias=True),
        "Signum": Made("signum", correct_bias=True, nesterov=False, use_shape_scaling=False),
        "SimplifiedAdEMAMix": Made(
            "simplified_ademamix", renamed(min_beta_fast="min_beta1", num_beta_fast_warmup_steps="beta1_warmup")
        ),
    },
    "legacy_soap": {"SOAP": SOAP, "REKLS": SOAP},
}


# -- Newton and Schulz's rounds
FP32: dict[str, Any] = dict(vars(matrices))
exec(inspect.getsource(matrices.newton_schulz).replace("torch.bfloat16", "torch.float32"), FP32)


def newton_schulz(
    x: Tensor,
    steps: int,
    coefficient_type: str = "quintic",
    custom_coefficient_sets: Any = None,
    eps: float = 1e-15,
    transpose: bool | None = None,
    tp_group: Any = None,
) -> Tensor:
    """Return what our rounds make of x: in fp32, as these tests ask for; over ranks, a step of Muon."""
    if dist.is_initialized():
        return stepped(x, steps, coefficient_type, tp_group, None if tp_group is None else 0 if transpose else 1)
    number = series.number(rounds(coefficient_type, steps, custom_coefficient_sets))
    made: Tensor = FP32["newton_schulz"](x, steps, 1.0, eps, number)
    return made


def newton_schulz_tp(
    x: Tensor, steps: int, coefficient_type: str, tp_group: Any, partition_dim: int | None = None, tp_mode: str = ""
) -> Tensor:
    return stepped(x, steps, coefficient_type, tp_group, partition_dim)


def sharded(local: Tensor, group: Any, dim: int | None) -> Tensor:
    return local if dim is None else DTensor.from_local(local, DeviceMesh.from_group(group, "cpu"), [Shard(dim)])


def stepped(x: Tensor, steps: int, kind: str, group: Any, dim: int | None) -> Tensor:
    """Return the first step of Muon from a weight of 0: the gradient x, made orthogonal."""
    p = nn.Parameter(sharded(torch.zeros_like(x), group, dim))
    coefficients = {"ns_steps": steps, "ns_coefficients": rounds(kind, steps)}
    given: Options = {"momentum": 0.0, "nesterov": False, "weight_decay": 0.0, "eps": 1e-15, "plan": "fp32"}
    opt = optgen.optim.Muon([p], lr=max(1.0, p.shape[-2] / p.shape[-1]) ** -0.5, **coefficients, **given)
    p.grad = sharded(x.detach().clone(), group, dim)
    opt.step()
    made = p.detach()
    return -(made.to_local() if isinstance(made, DTensor) else made)


class Sharded:
    """TpRekls: SOAP over DTensors that share the memory of local parameters."""

    def __init__(self, groups: Any, lr: float, tp_group: Any) -> None:
        found = [(p, group["partition_dim"]) for group in groups for p in group["params"]]
        self.parts = [(p, dim, nn.Parameter(sharded(p.data, tp_group, dim))) for p, dim in found]
        self.group, self.opt = tp_group, SOAP([whole for *_, whole in self.parts], lr=lr)

    def step(self) -> None:
        for p, dim, whole in self.parts:
            whole.grad = sharded(p.grad, self.group, dim)
        self.opt.step()


# -- other functions of matrices
def rayleigh(factors: list[Tensor], bases: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    return [(q.mT @ x @ q).diagonal() for x, q in zip(factors, bases, strict=True)], bases


def get_eigenbasis_eigh(kronecker_factor_list: list[Tensor]) -> Any:
    return rayleigh(kronecker_factor_list, [matrices.eigenvectors(x) for x in kronecker_factor_list])


def get_eigenbasis_qr(kronecker_factor_list: list[Tensor], eigenbasis_list: list[Tensor], **_: Any) -> Any:
    pairs = zip(kronecker_factor_list, eigenbasis_list, strict=True)
    return rayleigh(kronecker_factor_list, [matrices.orthogonal_iteration(x, q) for x, q in pairs])


def install(plan: str) -> None:
    """Replace their names by ours.  Python before 3.12 cannot read the module of the registry, which is not needed."""
    sys.path.insert(0, os.environ["OPTGEN_OTHERS_CHECKOUT"])
    vars(typing).setdefault("override", lambda method: method)
    registry: Any = ModuleType(f"{PACKAGE}.registry")
    registry.register_optimizer = lambda name: lambda cls: cls
    sys.modules[registry.__name__] = registry
    for module, classes in CLASSES.items():
        vars(theirs(module)).update(classes)
    utils = theirs("orthogonalized_optimizers.muon_utils")
    utils.newton_schulz, utils.newton_schulz_tp = newton_schulz, newton_schulz_tp
    for name in ("inv_root_via_eigh", "mat_root_inv_via_scaled_cans"):
        setattr(theirs("legacy_soap.matrix_root_inverse_utils"), name, lambda x: matrices.inverse_root(x, 2.0))
    vars(theirs("legacy_soap.soap_utils")).update(
        get_eigenbasis_eigh=get_eigenbasis_eigh, get_eigenbasis_qr=get_eigenbasis_qr
    )
    theirs("legacy_soap.rekls").REKLS, theirs("legacy_soap.tp_rekls").TpRekls = SOAP, Sharded


REWRITES = {
    r"flags\.DEFINE_.*": "",
    r"FLAGS = flags\.FLAGS": 'FLAGS = type("Flags", (), {"device": "cpu", "seed": 0})',
    r'if FLAGS\.device == "cpu":\n(.*)VsReference': r"if False:\n\1VsReference",
    "Invalid (weight_decay|momentum)": r"\1 must be",
    "Invalid learning rate": "lr must be",
    "Invalid epsilon": "eps must be",
    "Invalid beta at index (.)": r"betas.\1. must be",
    "Invalid min_beta_fast": "min_beta1 must be",
    "Invalid num_beta_fast_warmup_steps": "beta1_warmup must be",
    "num_ns_steps must be (positive|at least 1)": "ns_steps must be",
    '"moment2_buffer"': '{"adamuon": "exp_avg_sq", "normuon": "row_sq"}[moment2_method]',
    r'(CLS = Signum\n    STATE_KEYS = \()"exp_avg"': r'\1"momentum_buffer"',
}

REFUSED = "theirs: it refuses closures and vectors; `step` takes closures as in torch, and vectors have AdamW"
ONE = {
    "closure_unsupported": REFUSED,
    "MixOptimizerTest::test_optimizer_step_matches": "theirs: the bits of its order of operations, 2 roundings away",
    r"SoapVsReference.*eigenbasis": "theirs: names of states, and bases of the newest gradient",
    r"SoapVsReference.*update_close_to_reference\d*[02468]$": "ours: SOAP corrects the bias in any case",
    "before_muon_update_scaling": "ours: AdaMuon and NorMuon have one scale of a step, their papers'",
    "AdaptiveMuonTest::test_non_2d": REFUSED,
    "SoapVsReference": "theirs: its SOAP moves at the first step, and as docs/peers.md says",
}
OWN = "theirs: own functions, base classes, private methods, and checks of arguments that are translated"
ELSEWHERE = "theirs: needs a GPU, or is skipped in any case"
NOT_ONE = {
    "UpdateFunctionTest|MAdam|SoapFunctions|MuonUtils|SchulzStep|OrthFnTest|OrthogonalizedOptimizerTest|MopTest": OWN,
    "use_syrk_falls|MultiStream": ELSEWHERE,
    "_init_group|read_only|orthogonalize_fn|_logs_": OWN,
    "_type_error|wrong_step|custom_without|invalid_coeff|invalid_scale|Hyperball.*(error|hook)": OWN,
    r"test_update_close_to_reference(25|27|29|31)$": ELSEWHERE,
    "underflowed_norm": "ours: a norm is 0 if all elements are below 1e-23; theirs squares in fp64",
    r"AdaptiveMuonTest.*(smoke(4|5|10|11|16|17)|shapes2|scaling2|step2|namo_.*)$": "ours: NAMO is no rule here",
    "_rejects_|preserves_pre_scale": OWN,
    "with_kl_shampoo": "ours: SOAP has no factors of KL-Shampoo, which is a rule of its own here",
}
FILES_LEFT_OUT = {
    "ours: no such rule": "contrib/test_muown.py test_isospectral.py test_moso.py test_normalized_optimizer.py "
    "test_spel.py test_row_norm.py",
    "ours: SOAP has no factors of KL-Shampoo": "test_soap_v3.py test_stacked_soap.py",
    "theirs: own functions and base classes": "test_distributed_soap_utils_cpu.py test_eig_utils.py test_registry.py "
    "test_procrustes_step.py test_psgd_contractions.py test_psgd_utils.py test_spectral_clipping_utils.py "
    "test_utils_modules.py test_weight_decay_mixin.py test_weight_update_hooks.py",
    "theirs: kernels of its own for a GPU": "test_triton_kernels.py",
}

SUITES = [
    Suite(
        "fp32", "tests", ("test_muon_utils.py", "test_orthogonalized_optimizer.py", "test_polargrad.py",
        "test_scalar_optimizers.py", "test_soap.py", "test_adaptive_muon.py", "test_psgd_pro.py",
        "test_matrix_root_inverse_utils.py", "test_soap_utils.py"), REWRITES, ONE, NOT_ONE,
    ),
    Suite(
        "fp32", "tests", ("test_distributed_muon_utils_cpu.py", "test_distributed_rekls_cpu.py"), REWRITES,
        left_out={"SchulzStep|distributed_normalize|use_syrk": OWN}, kind="four ranks", ranks=4,
        environ={"WORLD_SIZE": "4"},
    ),
]  # fmt: skip
