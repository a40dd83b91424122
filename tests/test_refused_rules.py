"""Rules that must not become optimizers, and what is said of them."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from optgen.base.errors import UserError
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
