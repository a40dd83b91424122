"""The text of Triton tiles and codecs in strict maths, run as eager torch: `load` gives their functions.

Tiles and codecs are pure functions of tensors, so that a stand-in for `triton.language` of the few functions that they
call is all that it takes.  Nothing here imports Triton.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from optgen.runtime.reference import eager

DEVICE, CODECS = "optgen.runtime.gpu.", "optgen.runtime.gpu.codecs"
"""The modules of device functions; of these `codecs` is loaded in the same way, and PRELUDE stands for the others."""

FILE = ".strict"
"""The end of the name of a module of tiles or codecs in strict maths."""


class Pointer:
    """The address of an entry, for each element, of a table of numbers in memory."""

    def __init__(self, table: Tensor, at: Tensor | int = 0) -> None:
        self.table, self.at = table, at

    def __add__(self, k: Tensor | int) -> Pointer:
        return Pointer(self.table, self.at + k)


_CAST = r"\.to\(\s*([\w.]+),\s*bitcast=True,?\s*\)"
_SHIFT = re.compile(_CAST.replace(r"([\w.]+)", r"tl\.uint32") + r"\s*>>\s*(\w+)\s*\)" + _CAST)


def torch_text(text: str) -> str:
    """Return the text of tiles or codecs with `x.view(dtype)` for x.to(dtype, bitcast=True), as torch has it, and with
    a mask for the zeros that come in from above where a word is shifted as one without a sign."""

    def shifted(found: re.Match[str]) -> str:
        k = found[1]
        mask = hex((1 << 32 - int(k)) - 1) if k.isdigit() else f"((1 << 32 - {k}) - 1 | -({k} == 0))"
        return f" >> {k} & {mask})"

    return re.sub(_CAST, r".view(\1)", _SHIFT.sub(shifted, text))


def _where(condition: Tensor, x: Any, y: Any) -> Tensor:
    one_of_numbers = not isinstance(x, Tensor) and not isinstance(y, Tensor)
    return eager.choose(condition, x, y) if one_of_numbers else torch.where(condition, x, y)


def _limit(upper: bool) -> Callable[..., Tensor]:
    """tl.maximum or tl.minimum: of floats NaN if either is, and of two zeros the one that GPUs have."""
    of_floats: Callable[..., Tensor] = eager.larger if upper else eager.smaller
    of_ints = torch.maximum if upper else torch.minimum

    def limit(x: Any, y: Any, propagate_nan: object = None) -> Tensor:
        if not isinstance(x, Tensor):
            x, y = y, x
        if isinstance(y, Tensor):
            return of_floats(x, y) if x.is_floating_point() else of_ints(x, y)
        if y == 0 and x.is_floating_point():
            return of_floats(x, y)
        clamped: Tensor = x.clamp(min=y) if upper else x.clamp(max=y)
        return clamped

    return limit


def _jit(function: Any = None, **_: object) -> Any:
    return function or _jit


def _block(reduce: Any, missing: int) -> Any:
    """The largest or smallest int32 along the last dimension; lanes that are not live do not count."""

    def reduced(x: Tensor, live: Tensor | None, MASKED: bool) -> Tensor:
        found: Tensor = reduce(torch.where(live, x, missing) if MASKED and live is not None else x, -1)
        return found

    return reduced


class Language(SimpleNamespace):
    """Functions and dtypes by their names in `triton.language`."""

    def __getattr__(self, name: str) -> Any:
        where = "optgen/runtime/reference/tile.py"
        raise AttributeError(f"tl.{name} has no meaning in eager torch: give it one in {where}")


LANGUAGE = Language(
    constexpr=lambda x: x,
    float32=torch.float32, bfloat16=torch.bfloat16, float16=torch.float16, float8e4nv=torch.float8_e4m3fn,
    int32=torch.int32, int16=torch.int16, int8=torch.int8, uint8=torch.uint8,
    PropagateNan=SimpleNamespace(ALL=None),
    abs=torch.abs, where=_where, maximum=_limit(True), minimum=_limit(False), sqrt_rn=eager.sqrt, div_rn=eager.quotient,
    expand_dims=lambda x, _: x.unsqueeze(-1), broadcast_to=lambda x, _: x, full=lambda shape, x, _: x,
    static_range=range, load=lambda x: x.table[x.at.long()],
)  # fmt: skip
"""`triton.language`, as far as strict tiles and codecs call it."""

block_max = _block(torch.amax, -(2**31))
block_min = _block(torch.amin, 2**31 - 1)
floor = torch.floor
rint = torch.round
minus = torch.neg
reciprocal = torch.reciprocal  # in strict maths nothing calls it
rotl = eager.rotl


def sign(x: Tensor) -> Tensor:
    found: Tensor = torch.where(x > 0, 1.0, torch.where(x < 0, -1.0, x))
    return found


def widened(x: Tensor) -> Tensor:
    return x.to(torch.float32)


PRELUDE: dict[str, Any] = {
    name: globals()[name]
    for name in ("block_max", "block_min", "floor", "rint", "minus", "reciprocal", "sign", "rotl", "widened")
} | {"tl": LANGUAGE, "triton": SimpleNamespace(jit=_jit), "INTERPRETED": SimpleNamespace(value=True)}
PRELUDE["narrow"] = lambda x, size, code, kind: code
"""The stand-ins for the device functions of `optgen.runtime.gpu.prelude`."""


@lru_cache(maxsize=512)
def load(name: str) -> ModuleType:
    """Return the module of that name as eager torch; ModuleNotFoundError where there is none."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"no module {name}", name=name)
    return run(Path(spec.origin).read_text(encoding="utf-8"), name, spec.origin)


def run(text: str, name: str, file: str) -> ModuleType:
    """Return the module that this text makes as eager torch."""
    tree, kept = ast.parse(torch_text(text), file), []
    found = ModuleType(__name__)  # dataclasses look their module up
    vars(found).update(PRELUDE)
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith("triton"):
            vars(found).update(_imported(node, name))
        elif not isinstance(node, (ast.Import, ast.ImportFrom)):
            kept.append(node)
    exec(compile(ast.Module(kept, []), file, "exec"), vars(found))
    return found


def _imported(node: ast.ImportFrom, within: str) -> dict[str, Any]:
    """Return what an import gives: codecs of other plans as eager torch, nothing for device functions, which PRELUDE
    has, or what it names."""
    name = importlib.util.resolve_name("." * node.level + (node.module or ""), within.rpartition(".")[0])
    if name.startswith(DEVICE) and name != CODECS:
        return {}
    source = load(name) if name == CODECS or name.endswith(FILE) else importlib.import_module(name)
    return {x.asname or x.name: getattr(source, x.name) for x in node.names}
