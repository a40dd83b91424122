"""Edge facts of rules that reduce: zeros, what is not finite and how far it reaches, and what is refused."""

import pytest
import torch

from optgen import compile as compile_class

from optgen.lang import (  # isort: skip
    col, col_mean, hyper, nonneg, optimizer, row, row_mean, rsqrt,
)  # fmt: skip
from tests.harness import plan_of
from tests.oracles import REDUCING
from tests.product import Cell, Run, at_shape, build, spec_of
from tests.test_rows_and_columns import at_times

SHAPE, AT = (4, 6), (1, 2)

E = torch.zeros(SHAPE, dtype=torch.bool).index_put_((torch.tensor(AT[0]), torch.tensor(AT[1])), torch.tensor(True))
ROW = E.any(1, keepdim=True).expand(SHAPE)
CROSS = ROW | E.any(0, keepdim=True)
ALL, NONE = E | ~E, E & ~E

REACH = {
    ("adam_mini", "nan"): (ROW, ROW), ("adam_mini", "inf"): (E, E), ("adashift", "nan"): (NONE, NONE),
    ("cautious_lion", "nan"): (E, E), ("cautious_lion", "inf"): (NONE, NONE), ("lamb", "nan"): (ALL, ALL),
    ("lars", "inf"): (E, ALL), ("sm3", "nan"): (E, CROSS), ("tam", "nan"): (E, E), ("tam", "inf"): (ALL, ALL),
}  # fmt: skip
"""What is not finite in some weights after a step whose gradient has one such element, and after the next one, which is
clean: a NaN reaches all that is divided by a sum over it; an infinite sum makes the others' quotients 0.  AdaShift's
first ten steps move nothing.  SM3 reads a maximum of a row at the next step.  A cosine that is NaN counts as 0 in TAM;
one of infinities is NaN at all elements."""


def trained(name: str, steps: int = 1) -> tuple[Run, torch.Generator]:
    draw = torch.Generator().manual_seed(0)
    run = Run(build(at_shape(Cell(name, "fp32", "float32"), SHAPE)), torch.randn(SHAPE, generator=draw))
    for _ in range(steps):
        run.step(torch.randn(SHAPE, generator=draw))
    return run, draw


@pytest.mark.parametrize("bad", ["nan", "inf"])
@pytest.mark.parametrize("name", sorted(REDUCING))
def test_what_is_not_finite_reaches_as_far_as_the_rule_sums(name: str, bad: str) -> None:
    """As far as in the spec, read in fp64; a NaN spoils its own element, unless the rule rests."""
    spec, (run, draw) = spec_of(name), trained(name, 0)
    exact, states, host = run.buffers["p"].double(), {}, {}
    for t in (1, 2, 3):
        before, g = exact, torch.randn(SHAPE, generator=draw)
        if t == 2:
            g[AT] = float(bad)
        run.step(g)
        exact, states, host = spec.evaluate(exact, g.double(), t, states, host)
        reached = ~exact.isfinite()
        assert torch.equal(~run.buffers["p"].isfinite(), reached)
        assert t == 1 or (name, bad) not in REACH or torch.equal(reached, REACH[name, bad][t - 2])
        assert t != 2 or bad == "inf" or reached[AT] or torch.equal(exact, before)


# -- refused
@optimizer(cite="nobody")
def unguarded(p, g, r=row(nonneg), c=col(nonneg), *, lr=hyper(1e-2, ge=0)):
    """Factored, with nothing to do for a vector."""
    r = 0.9 * r + 0.1 * row_mean(g * g)
    c = 0.9 * c + 0.1 * col_mean(g * g)
    p = p - lr * g * rsqrt(r + c + 1e-12)
    return p, r, c


@pytest.mark.parametrize("spec", [unguarded, at_times], ids=lambda s: s.name)
@pytest.mark.parametrize("shape", [(), (7,)], ids=str)
def test_a_vector_is_refused_by_a_rule_of_rows_when_the_optimizer_is_made(spec, shape) -> None:
    cls = compile_class(spec, plan_of("fp32"))
    good, bad = torch.nn.Parameter(torch.ones(2, 3)), torch.nn.Parameter(torch.ones(shape))
    text = rf"{spec.class_name}: parameter 'bias' \(float32 \[{'7' if shape else ''}\]\) has no rows and columns"
    with pytest.raises(ValueError, match=text):
        cls([("weight", good), ("bias", bad)])
    with pytest.raises(ValueError, match="parameter 1 "):
        cls([good, bad])
    optimizer_ = cls([good])
    with pytest.raises(ValueError, match="parameter 1 "):
        optimizer_.add_param_group({"params": bad})
    assert len(optimizer_.param_groups) == 1  # nothing was added
    bad.requires_grad_(False)
    optimizer_ = cls([("weight", good), ("bias", bad)])  # frozen parameters may be anything
    bad.requires_grad_(True)
    good.grad, bad.grad = torch.ones(2, 3), torch.ones(shape)
    with pytest.raises(ValueError, match=text):
        optimizer_.step()
    assert torch.equal(good, torch.ones(2, 3)) and not optimizer_.state
