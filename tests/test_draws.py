"""Random numbers of elements: their distribution, and that parameter, place, seed and step alone decide them."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from optgen.base.errors import UserError
from optgen.driver.compile import compile as compiled
from optgen.lang import hyper, normal, optimizer, rms, row_mean, shape_flag, state, uniform, where
from optgen.lang.elementary import erfinv
from optgen.optim import SGLD
from optgen.runtime.records.keys import step_key, stream_key
from optgen.runtime.reference.matrices import drawn
from tests.harness import python, same_bits

N = 1 << 18


@optimizer(cite="none: draws that two sweeps share, beside a state in blocks")
def restless(p, g, m=state(), *, lr=hyper(0.1), is_matrix=shape_flag(lambda shape: len(shape) >= 2)):
    u = where(uniform(0) < 0.5, normal(3), 0.0)
    if is_matrix:
        u = u - row_mean(u)
    m = 0.9 * m + u / (rms(u) + 1e-3)
    p = p - lr * (uniform(1) * g + m + normal(3))
    return p, m


def numbers(name: str = "uniform_0", parameter: str | int = "layers.0.weight", seed: int = 0, step: int = 7) -> Any:
    return drawn(torch.arange(N), name, step_key(seed, step), stream_key(parameter)).double()


def test_draws_are_even_normal_and_independent() -> None:
    """At six standard deviations; of Kolmogorov and Smirnov's distance 3.3 / sqrt(N) is as rare (7e-10)."""
    u = numbers()
    even = torch.arange(N).double() / N
    assert (u.sort().values - even).abs().max() <= 3.3 / math.sqrt(N)
    z = math.sqrt(2) * erfinv((2.0 * u - (1.0 - 2.0**-24)).float()).double()
    assert (torch.special.ndtr(z.sort().values) - even).abs().max() <= 3.3 / math.sqrt(N)
    assert abs(z.mean()) <= 6 / math.sqrt(N) and abs(z.var() - 1) <= 6 * math.sqrt(2 / N) and z.abs().max() < 5.421
    others = [numbers("uniform_1"), numbers(parameter=0), numbers(seed=1), *(numbers(step=t) for t in (8, 9, 263))]
    others += [u.roll(k) for k in (1, 2, 8, 64, 4096)]
    for other in others:
        for f in (lambda x: x - 0.5, lambda x: (x - 0.5).abs() - 0.25, lambda x: (x * 256 % 1) - 0.5):
            a, b = f(u), f(other)
            assert abs((a * b).mean()) <= 6 * a.std() * b.std() / math.sqrt(N)


def test_the_normal_quantile_is_within_four_units() -> None:
    k = torch.cat([torch.arange(2048), torch.randint(2**24, (N,), generator=torch.Generator().manual_seed(0))])
    x = 2.0 * (k.float() * 2.0**-24) - (1.0 - 2.0**-24)
    exact = torch.special.ndtri((2 * k.double() + 1) * 2.0**-25) / math.sqrt(2)
    unit = torch.exp2(exact.abs().log2().floor() - 23)
    assert ((erfinv(x).double() - exact).abs() <= 4 * unit).all()  # 3.76 at all of the 2^24 numbers


def stepped(cls: Any, shapes: Any, *, steps: int = 2, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
    """(parameters, optimizer) after some steps; gradients and first weights are those of the shapes."""
    params = {f"p{i}": torch.nn.Parameter(torch.linspace(-1, 1, math.prod(s)).view(s).to(dtype)) for i, s in shapes}
    opt = cls(params.items(), lr=1e-2, **options)
    further(params, opt, steps)
    return params, opt


def further(params: Any, opt: Any, steps: int) -> None:
    for _ in range(steps):
        for p in params.values():
            p.grad = torch.full_like(p, 0.25)
        opt.step()


SHAPES = tuple(enumerate([(5, 70), (300,), (2, 3, 44), (3, 129), (1,)]))


@pytest.mark.parametrize(("backend", "plan"), [("cpp", "int4_split24"), ("triton", "int8_split24")])
def test_strict_kernels_draw_what_the_reference_draws(backend: str, plan: str) -> None:
    cls = compiled(restless, plan, maths="strict")
    shapes = SHAPES if backend == "cpp" else SHAPES[:2]
    ours, _ = stepped(cls, shapes, backend=backend)
    reference, _ = stepped(cls, shapes, backend="reference")
    assert all(same_bits(p.detach(), reference[name].detach()) for name, p in ours.items())


def test_no_plan_order_or_rest_of_the_model_changes_a_draw() -> None:
    """The first step reads no state but zeros: it has the same bits under every plan."""
    found = [
        stepped(compiled(restless, plan), shapes, steps=1, dtype=torch.float32, backend="reference")[0]
        for plan, shapes in (("fp32", SHAPES), ("int8_split24", SHAPES[::-1]), ("int4_split24", SHAPES[:2]))
    ]
    assert all(same_bits(p.detach(), found[0][name].detach()) for params in found[1:] for name, p in params.items())
    other, _ = stepped(compiled(restless, "fp32"), SHAPES, steps=1, dtype=torch.float32, backend="reference", seed=1)
    assert all((p != found[0][name]).float().mean() > 0.9 for name, p in other.items())


def test_draws_go_on_after_a_checkpoint_and_in_other_modes() -> None:
    whole, _ = stepped(SGLD, SHAPES, steps=3)
    half, first = stepped(SGLD, SHAPES, steps=2)
    second = SGLD(half.items(), lr=1e-2)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    further(half, second, 1)
    freed, released = stepped(SGLD, SHAPES, steps=0)
    handle = released.release_gradients()
    for _ in range(3):
        sum((0.25 * p).float().sum() for p in freed.values()).backward()
    handle.remove()
    for params in (half, freed):
        assert all(same_bits(p.detach(), whole[name].detach()) for name, p in params.items())


@pytest.mark.slow
def test_a_standalone_file_draws_the_same(tmp_path: Path) -> None:
    shapes = SHAPES[:2]
    whole, _ = stepped(SGLD, shapes, steps=2, plan="fp32", backend="reference", dtype=torch.float32)
    torch.save({name: p.detach() for name, p in whole.items()}, tmp_path / "whole.pt")
    code = f"""
        import sys, torch, runpy
        sys.path.insert(0, {str(tmp_path)!r})
        from own import SGLD
        found = torch.load({str(tmp_path / 'whole.pt')!r})
        params = {{n: torch.nn.Parameter(torch.linspace(-1, 1, x.numel()).view(x.shape)) for n, x in found.items()}}
        opt = SGLD(params.items(), lr=1e-2)
        for _ in range(2):
            for p in params.values():
                p.grad = torch.full_like(p, 0.25)
            opt.step()
        assert all(torch.equal(p, found[n]) for n, p in params.items())
    """
    command = ["build", "--standalone", "sgld", "--plan", "fp32", "--out", str(tmp_path / "own.py")]
    python("import sys; from optgen.driver.cli import main; main()", *command)
    python(code)


def test_the_number_of_a_draw_stands_in_the_spec() -> None:
    def moving(p, g, t, *, lr=hyper(0.1)):
        p = p - lr * g * normal(t)
        return p

    def named(p, g, uniform_0=state(), *, lr=hyper(0.1)):
        p = p - lr * uniform_0
        return p, uniform_0

    spec = optimizer(cite="none")(moving)
    with pytest.raises(UserError, match="E103"):
        spec.check()
    with pytest.raises(UserError, match="E115"):
        optimizer(cite="none")(named)
    with pytest.raises(UserError, match="E103"):
        normal(0)
