"""The weights that a model is evaluated with, if they are not those that it trains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from optgen.runtime.checkpoint import checkpoint
from optgen.runtime.layout import sharding


def weights(cls: Any, group: Mapping[str, Any], p: Tensor, kept: Mapping[str, Tensor], name: str | int) -> Tensor:
    """Return `cls.evaluation` of a parameter and its states: fp32, of the shape of p or of this rank's part of it."""
    _, plan, variant = checkpoint.select(cls, group, p, name)
    function = cls.evaluation
    code = function.__code__
    names = code.co_varnames[: code.co_argcount]
    options = code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]
    values = sharding.locals_of(sharding.decode(plan, variant, p, kept, names))
    hypers = {hyper.name: hyper.read(group[hyper.name]) for hyper in cls.HYPERS if hyper.name in options}
    made = function(*(values[name] for name in names), **hypers)
    assert isinstance(made, Tensor)
    return made.to(torch.float32)
