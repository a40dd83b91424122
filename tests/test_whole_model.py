"""Rules that look at the whole model, change from step to step, evaluate other weights, or multiply matrices.

The oracles are the authors' own packages, torch, and the wrapped rule itself.  Each is run in fp64 and in fp32 on the
same gradients: ours (fp32) may be no further from the fp64 path than twice the package's own fp32 run, and 4 ulp.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import dadaptation
import prodigyopt
import pytest
import schedulefree
import torch
from torch import Tensor

import optgen
from tests import oracles

ULP = 2.0**-23
SHAPES = ((40, 30), (30,), (1, 7), (7, 1), (4, 3, 5), (6, 2, 3, 3), ())
Make = Callable[[list[torch.nn.Parameter]], Any]


def compiled(name: str, plan: str = "fp32") -> Any:
    return optgen.compile(name, plan=plan)


def weights(shapes: Sequence[tuple[int, ...]], seed: int = 0) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=g) for shape in shapes]


def gradients(shapes: Sequence[tuple[int, ...]], steps: int, seed: int = 1) -> list[list[Tensor]]:
    """Noise around a direction that stays, so that estimates of distances have something to find."""
    g = torch.Generator().manual_seed(seed)
    drift = [torch.randn(shape, generator=g) for shape in shapes]
    return [[0.5 * d + torch.randn(d.shape, generator=g) for d in drift] for _ in range(steps)]


def walk(
    make: Make,
    start: Sequence[Tensor],
    steps: Sequence[Sequence[Tensor]],
    dtype: torch.dtype,
    after: Callable[[Any], None] = lambda opt: None,
) -> tuple[list[Tensor], Any]:
    """The weights after all steps, fp64, and the optimizer."""
    params = [torch.nn.Parameter(w.to(dtype, copy=True)) for w in start]
    opt = make(params)
    for gs in steps:
        for p, g in zip(params, gs, strict=True):
            p.grad = g.to(dtype, copy=True)
        opt.step()
    after(opt)
    return [p.detach().double() for p in params], opt


def hold(ours: Sequence[Tensor], theirs: Sequence[Tensor], exact: Sequence[Tensor]) -> None:
    """Ours lies no further from the fp64 path than twice the other fp32 run, and 4 ulp of a weight's size."""
    for a, b, x in zip(ours, theirs, exact, strict=True):
        allowed = 2 * (b - x).abs().max() + 4 * ULP * x.abs().max()
        assert (a - x).abs().max() <= allowed
        assert torch.isfinite(a).all()


def follow(
    theirs: Make, ours: Make, shapes: Sequence[tuple[int, ...]] = SHAPES, count: int = 20,
    after: Any = lambda opt: None,
) -> tuple[Any, Any, Any]:
    """Hold ours to theirs on the same gradients; the optimizers: theirs in fp64, in fp32, and ours."""
    start, gs = weights(shapes), gradients(shapes, count)
    exact, a = walk(theirs, start, gs, torch.float64, after)
    other, b = walk(theirs, start, gs, torch.float32, after)
    own, c = walk(ours, start, gs, torch.float32, after)
    hold(own, other, exact)
    return a, b, c


def estimate(opt: Any) -> float:
    """The distance that an optimizer of ours or of the authors has estimated: one for the whole model."""
    if not isinstance(opt, optgen.runtime.Optimizer):
        return float(opt.param_groups[0]["d"])
    (d,) = {float(s["d"]) for s in opt.state.values() if s}
    return d


def hold_estimate(a: Any, b: Any, c: Any) -> None:
    """Ours is no further from the fp64 one than twice the other, whose sum is in fp64, and 20 steps of 6 roundings."""
    want = estimate(a)
    assert abs(estimate(c) - want) <= 2 * abs(estimate(b) - want) + 20 * 6 / 2 * ULP * want


# -- Schedule-Free
@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_weights_for_evaluation_are_the_authors(name: str, compact: bool) -> None:
    def theirs(params: list[torch.nn.Parameter]) -> Any:
        kind = schedulefree.AdamWScheduleFree if name == "adamw" else schedulefree.SGDScheduleFree
        opt = kind(params, foreach=False, lr=0.05, warmup_steps=5)
        opt.train()
        return opt

    cls = compiled(f"schedule_free_{name}")
    ours = lambda ps: cls(ps, plan="fp32", lr=0.05, warmup_steps=5, compact=compact)  # noqa: E731
    follow(theirs, ours, after=lambda opt: opt.eval())


# -- sums over the model


AUTHORS: dict[str, Callable[..., Any]] = {
    "prodigy": prodigyopt.Prodigy,
    "dadapt_adam": lambda groups, **options: dadaptation.DAdaptAdam(groups, **{"decouple": True} | options),
}


@pytest.mark.parametrize("backend", ["cpp", "reference"])
def test_a_clipped_spike_is_squared_after_it_is_clipped(backend: str) -> None:
    """The square of the factor, 1e-44, would vanish or lose its bits where that of the product does not."""
    spike, max_norm, beta2 = 1e19, 1e-3, 0.999
    p = torch.nn.Parameter(torch.ones(4, 16))
    p.grad = torch.zeros(4, 16)
    p.grad[0, 0] = spike
    opt = compiled("clipped_adamw")([p], backend=backend, max_norm=max_norm, betas=(0.9, beta2))
    opt.step()
    # Fewer than 16 roundings of 2^-24 each, and an approximate root and quotient by 4 ulp each, squared.
    bound = (16 + 4 * 8) * 2**-24
    assert opt.state[p]["exp_avg_sq"][0, 0].item() == pytest.approx((1 - beta2) * max_norm**2, rel=bound)


@pytest.mark.parametrize("name", AUTHORS)
@pytest.mark.parametrize("frozen", [0, 1])
def test_a_group_with_a_rate_of_0_has_no_part_in_the_estimate(name: str, frozen: int) -> None:
    """Wherever it stands: the authors' packages take the largest rate, and leave these groups out."""
    cls = compiled(name)

    def groups(ps: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
        return [{"params": ps[:3], "lr": float(frozen != 0)}, {"params": ps[3:], "lr": float(frozen != 1)}]

    found = follow(lambda ps: AUTHORS[name](groups(ps), d0=1e-2), lambda ps: cls(groups(ps), plan="fp32", d0=1e-2))
    still = slice(None, 3) if frozen == 0 else slice(3, None)
    ours = [p for group in found[2].param_groups for p in group["params"]]
    assert all(torch.equal(p, w) for p, w in zip(ours[still], weights(SHAPES)[still], strict=True))
    assert estimate(found[0]) > 1e-2
    hold_estimate(*found)


@pytest.mark.parametrize("name", AUTHORS)
def test_an_estimate_waits_while_the_rate_is_0(name: str) -> None:
    """Before a warm-up's first step, and within a run: neither the weights nor the states move."""
    cls = compiled(name)
    rates = [0.0, 0.0, 0.3, 0.6, *[1.0] * 4, 0.0, 0.0, *[1.0] * 4]

    def scheduled(opt: Any) -> Any:
        left, before = iter(rates), []

        def set_rate(*_: Any) -> None:
            opt.param_groups[0]["lr"] = next(left)
            before[:] = [p.detach().clone() for p in opt.param_groups[0]["params"]]

        def still(*_: Any) -> None:
            assert opt.param_groups[0]["lr"] or all(map(torch.equal, opt.param_groups[0]["params"], before))

        opt.register_step_pre_hook(set_rate)
        opt.register_step_post_hook(still)
        return opt

    found = follow(
        lambda ps: scheduled(AUTHORS[name](ps, d0=1e-2)),
        lambda ps: scheduled(cls(ps, plan="fp32", d0=1e-2)),
        count=len(rates),
    )
    assert estimate(found[0]) > 1e-2
    hold_estimate(*found)


def test_states_of_the_model_reach_parameters_that_missed_a_step() -> None:
    """A parameter without a gradient, and one whose first gradient comes late, see the same d as all others; a user's
    own entries are no states of the model."""
    cls, shapes = compiled("prodigy"), ((4, 3), (5,), (2,))
    found = []
    for own in (False, True):
        params = [torch.nn.Parameter(w.clone()) for w in weights(shapes)]
        opt = cls(params, plan="fp32", d0=1e-2)
        if own:
            opt.state["n"], opt.state["mine"] = 5, {"d": torch.tensor(7.0), "step": 3}
        for k, step in enumerate(gradients(shapes, 6)):
            for i, (p, g) in enumerate(zip(params, step, strict=True)):
                missing = (i == 1 and k == 3) or (i == 2 and k < 4)
                p.grad = None if missing else g.clone()
            opt.step()
            assert len({float(opt.state[p]["d"]) for p in params if opt.state.get(p)}) == 1
        assert not own or (opt.state["n"], float(opt.state["mine"]["d"])) == (5, 7.0)
        assert float(opt.state[params[0]]["d"]) > 1e-2
        found.append(params)
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("name", AUTHORS)
def test_groups_that_would_begin_a_state_of_the_model_with_different_numbers_are_refused(name: str) -> None:
    cls = compiled(name)
    params = [torch.nn.Parameter(w) for w in weights(((4, 3), (5,), (2,)))]
    before = [p.detach().clone() for p in params]
    opt = cls([{"params": [p], "d0": d0} for p, d0 in zip(params, (1e-6, 1e-2, 1e-3), strict=True)], plan="fp32")
    for p in params:
        p.grad = torch.ones_like(p)
    with pytest.raises(RuntimeError, match=r"0 \(.*\) begins d with d0=1e-06, but parameter 1 .* with d0=0.01: d is"):
        opt.step()
    assert not opt.state
    assert all(map(torch.equal, params, before))
    for group in opt.param_groups[1:]:
        group["d0"] = torch.tensor(1e-6)  # the same number in fp32
    opt.step()
    assert len({float(opt.state[p]["d"]) for p in params}) == 1


def test_a_group_that_begins_later_takes_over_a_state_of_the_model_whatever_it_says() -> None:
    cls = compiled("prodigy")
    params = [torch.nn.Parameter(w) for w in weights(((4, 3), (5,), (2,)))]

    def groups() -> list[dict[str, Any]]:
        return [{"params": params[:1], "d0": 2.0**-6}, {"params": params[1:], "d0": 1e-6}]

    opt = cls(groups(), plan="fp32")
    params[0].grad = torch.ones(4, 3)
    opt.step()
    loaded = cls(groups(), plan="fp32")
    loaded.load_state_dict(copy.deepcopy(opt.state_dict()))
    for found in (opt, loaded):
        for p in params:
            p.grad = torch.ones_like(p)
        found.step()
        assert {float(s["d"]) for s in found.state.values()} == {float(found.state[params[0]]["d"])}
        assert float(found.state[params[2]]["d"]) >= 2.0**-6


# -- matrix products
MATRICES = ((40, 30), (30, 40), (1, 7), (7, 1), (1, 1), (64, 64))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("muon", {}), ("muon", {"nesterov": False, "weight_decay": 0.0, "momentum": 0.5}),
        ("muon", {"match_rms_adamw": True, "lr": 0.05, "ns_steps": 3, "ns_coefficients": (3.0, -4.0, 2.0)}),
        ("adago", {}), ("adamuon", {}), ("low_rank_muon", {}), ("polargrad", {}), ("scion", {}),
        ("scion", {"sign_norm": True}), ("scion", {"row_norm": True}),
    ],
)  # fmt: skip
def test_rules_of_matrices_are_their_oracles(name: str, options: dict[str, Any]) -> None:
    """Muon's is torch's."""
    cls, start, gs = compiled(name), weights(MATRICES), gradients(MATRICES, 12)
    hypers: dict[str, Any] = {h.name: h.default for h in cls.HYPERS}
    hypers |= {"ns_coefficients": (3.4445, -4.7750, 2.0315), "ns_steps": 5, "lr": 0.02} | options
    flags = dict.fromkeys(("adamw", "sign_norm", "row_norm", "match_rms_adamw"), False) | {"nesterov": True}
    flags |= {flag: x for flag, x in options.items() if flag in flags}
    ours, _ = walk(lambda ps: cls(ps, plan="fp32", **hypers), start, gs, torch.float32)
    for k, (w, own) in enumerate(zip(start, ours, strict=True)):
        step, x = oracles.WHOLE[name](flags, {h: x for h, x in hypers.items() if h not in flags}), w.clone()
        for t, g in enumerate((g[k] for g in gs), 1):
            x = step(x, g, t, hypers["lr"])
        (rows, columns), n = w.shape, w.numel()
        # The largest entry of a step of lr = 1, and how far it may be rounded: a direction goes through bf16, and where
        # momentum differs in its last bit, a step may differ by a bf16 rounding of the orthogonal matrix, whose entries
        # are at most 1.2; or by a sum of squares and few operations of fp32.  A nuclear norm is that of a momentum
        # whose elements are below 5.
        tall = 1.2 * max(1.0, rows / columns) ** 0.5
        size, rounding = {
            "muon": (1.2 * 0.2 * max(w.shape) ** 0.5 if flags["match_rms_adamw"] else tall, 2.0**-7),
            "adago": (1.2, 2.0**-7),
            "adamuon": (0.2 * n**0.5, (n / 2 + 32) * 2.0**-24),
            "low_rank_muon": (tall, 2.0**-7),
            "polargrad": (1.2 * 5 * n**0.5 * min(w.shape) ** 0.5, 2 * 2.0**-7),
            "scion": (1.2 * (rows / columns) ** 0.5, 2.0**-7),
            "sign_norm": (1.0, 0.0),
            "row_norm": (columns**0.5, (columns / 2 + 32) * 2.0**-24),
        }[next(iter(options), name) if name == "scion" else name]
        assert (own - x).abs().max() <= 12 * (hypers["lr"] * size * rounding + 2 * ULP * x.abs().max())
        assert (own - x).abs().median() <= 12 * 4 * ULP * x.abs().max()
