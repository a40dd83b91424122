"""Rules that must not become optimizers, and what is said of them."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from optgen.base.errors import UserError
from optgen.ir import node
from optgen.ir.spell import name_for
from optgen.lang import Spec, flag, hyper, optimizer, state


def refused(spec: Spec) -> UserError:
    with pytest.raises(UserError) as caught:
        spec.check()
    return caught.value


def _signed(p: Any, m: Any) -> Any:
    with contextlib.suppress(Exception):
        if p > 0:
            return p * 2
    return p - m


def test_a_refusal_in_a_helper_stands_though_it_is_suppressed_there() -> None:
    @optimizer(cite="nobody")
    def helped(p, g, m=state(), *, lr=hyper(1e-3, ge=0)):
        m = 0.9 * m + lr * g
        p = _signed(p, m)
        return p, m

    error = refused(helped)
    assert error.code == "E101"
    assert error.locs[0].function == "_signed"


def test_the_first_refusal_is_told_whatever_the_rule_raises_after_it() -> None:
    @optimizer(cite="nobody")
    def renamed(p, g, *, lr=hyper(1e-3, ge=0)):
        try:
            p = p - lr * float(g)
        except UserError as error:
            raise SystemExit("gives up") from error
        return p

    assert refused(renamed).code == "E102"


def test_a_refusal_in_another_spec_s_trace_stands_too() -> None:
    @optimizer(cite="nobody")
    def inner(p, g, *, lr=hyper(1e-3, ge=0)):
        if g > 0:
            p = p - lr * g
        return p

    @optimizer(cite="nobody")
    def outer(p, g, *, lr=hyper(1e-3, ge=0)):
        with contextlib.suppress(Exception):
            inner.trace()
        p = p - lr * g
        return p

    assert refused(outer).code == "E101"


def test_a_state_that_is_off_is_refused_on_numbers_though_the_rule_catches_it() -> None:
    @optimizer(cite="nobody")
    def caught(p, g, m=state(when="heavy"), *, lr=hyper(1e-3, ge=0), heavy=flag(False)):
        try:
            m = 0.9 * m + g
            p = p - lr * m
        except UserError:
            p = p - lr * g
        return p, m

    with pytest.raises(UserError) as error:
        caught.evaluate(1.0, 0.5, 1)
    assert error.value.code == "E105"


def test_what_python_raises_may_be_caught() -> None:
    @optimizer(cite="nobody")
    def plain(p, g, *, lr=hyper(1e-3, ge=0)):
        try:
            p = p - lr * g.clamp(-1, 1)
        except AttributeError:
            p = p - lr * g
        return p

    plain.check()


def test_numbers_beyond_fp32_may_stand_between_host_scalars() -> None:
    @optimizer(cite="nobody")
    def host(p, g, t, *, lr=hyper(1e-3, ge=0)):
        lr = lr * 1e60 / (t + 1e60)
        p = p - lr * g
        return p

    host.check()


@pytest.mark.parametrize(
    ("eps", "code"), [(1e-30, ""), (1.2e-38, ""), (1.1e-38, "E140"), (1e-44, "E140"), (1e-60, "E140")]
)  # the smallest normal number of fp32 is 1.18e-38; fast maths may take what is below it for 0
def test_a_guard_counts_as_fp32_has_it(eps: float, code: str) -> None:
    @optimizer(cite="nobody")
    def guarded(p, g, *, lr=hyper(1e-3, ge=0), eps=hyper(eps, ge=0)):
        p = p - lr * g / (abs(g) + eps)
        return p

    if code:
        assert refused(guarded).code == code
    else:
        guarded.check()


def test_rules_of_a_thousand_operations_in_a_row_are_checked() -> None:
    @optimizer(cite="nobody")
    def long(p, g, *, lr=hyper(1e-3, ge=0)):
        for _ in range(1200):
            g = g * 0.9 + lr
        p = p - lr * g
        return p

    long.check()


def test_an_interrupt_passes() -> None:
    @optimizer(cite="nobody")
    def interrupted(p, g, *, lr=hyper(1e-3, ge=0)):
        p = p - lr * g
        raise KeyboardInterrupt
        return p

    with pytest.raises(KeyboardInterrupt):
        interrupted.check()


def test_long_chains_and_towers_have_short_names() -> None:
    chain = tower = node.sym("lr")
    for _ in range(1200):
        chain = node.op("add", node.op("mul", chain, node.const(0.99)), node.sym("lr"))
    for _ in range(60):
        tower = node.op("mul", tower, tower)  # two readings of each would be 2^60
    assert name_for(chain, "named") == name_for(tower, "named") == "named"
    assert name_for(node.op("neg", node.op("mul", node.sym("lr"), node.sym("wd"))), "named") == "minus_lr_times_wd"
