"""Weights of which layers see 8 bits, and of which a step keeps 24: a parameter of three tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from inspect import getattr_static
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map


class Kind(NamedTuple):
    """A float of 8 bits.

    dtype     torch.float8_e4m3fn
    largest   448
    mantissa  the bits of it: 3
    lowest    the exponent of the smallest normal number: -6
    known     the dtype by which plans know it: torch.uint8
    """

    dtype: torch.dtype
    largest: int
    mantissa: int
    lowest: int
    known: torch.dtype


KINDS = {
    "e4m3": Kind(torch.float8_e4m3fn, 448, 3, -6, torch.uint8),
    "e5m2": Kind(torch.float8_e5m2, 57344, 2, -14, torch.int8),
}

SHARING = 64
"""Neighbours of a row that share a scale."""

BITS = 16
"""Bits of each weight beside its code."""

NAN = 255
"""The exponent of a scale that is no number."""

OWN = ("weight_scale", "weight_low")
"""The names, as those of fields of states, of what an Fp8Weight has beside its codes."""

KIND = "fp8_weight"
"""The key by which a file knows a weight of three tensors."""

_SET_DATA: Any = getattr_static(Tensor, "data").__set__
"""The function that `p.data = value` calls."""

_ops = torch.ops.aten
_SAME = {_ops.detach.default, _ops.alias.default}
_TURNED = {_ops.t.default, _ops.transpose.int, _ops.permute.default}


class Fp8Weight(Tensor):
    """A matrix that reads as e4m3 or e5m2 numbers under a power of two per 64 of a row, and is more exact than that.

    codes   of torch.float8_e4m3fn or float8_e5m2, as bytes: (rows, columns)
    scale   exponents of the powers of two, E8M0: (rows, columns / 64)
    low     what a magnitude is above that of its code, in 2^-16 of the code's last place, int16: (rows, columns)
    kind    "e4m3" or "e5m2"
    turned  True for the transposed matrix

    It says a dtype of 16 bits, in which layers compute and which gradients have.  Operators read the numbers of the
    codes in it; operators in place, optimizers and copies read and write the exact ones.  Transposed it is still one;
    of other views, which could not be written to, RuntimeError.
    """

    codes: Tensor
    scale: Tensor
    low: Tensor
    kind: str
    turned: bool

    @staticmethod
    def __new__(
        cls, codes: Tensor, scale: Tensor, low: Tensor, dtype: torch.dtype, kind: str = "e4m3", turned: bool = False
    ) -> Fp8Weight:
        of = codes.t() if turned else codes
        make: Any = Tensor._make_wrapper_subclass
        made: Fp8Weight = make(cls, of.shape, strides=of.stride(), dtype=dtype, device=codes.device)
        made.codes, made.scale, made.low, made.kind, made.turned = codes, scale, low, kind, turned
        return made

    def __repr__(self, **given: Any) -> str:  # type: ignore[override]
        return f"Fp8Weight({list(self.shape)}, {self.kind}, dtype={self.dtype})"

    def __tensor_flatten__(self) -> tuple[list[str], tuple[torch.dtype, str, bool]]:
        return ["codes", "scale", "low"], (self.dtype, self.kind, self.turned)

    @staticmethod
    def __tensor_unflatten__(inner: Mapping[str, Tensor], given: Any, size: Any, stride: Any) -> Fp8Weight:
        return Fp8Weight(inner["codes"], inner["scale"], inner["low"], *given)

    @staticmethod
    def of(x: Tensor, dtype: torch.dtype, kind: str = "e4m3") -> Fp8Weight:
        """Return a weight of the numbers of a matrix, in fp32."""
        rows, columns = x.shape
        codes = torch.empty(rows, columns, dtype=torch.uint8, device=x.device)
        scale = torch.empty(rows, columns // SHARING, dtype=torch.uint8, device=x.device)
        made = Fp8Weight(codes, scale, torch.empty_like(codes, dtype=torch.int16), dtype, kind)
        made.write(x)
        return made

    def write(self, x: Tensor) -> None:
        """Take these numbers."""
        if self.turned:
            x = x.t()
        of, largest, *_ = KINDS[self.kind]
        blocks = x.to(torch.float32).reshape(*self.scale.shape, SHARING)
        top = blocks.abs().amax(-1, keepdim=True)
        fraction, exponent = torch.frexp(top.double() / largest)
        scale = (exponent - (fraction == 0.5).int() + 127).clamp(0, 254)
        scale = torch.where(top == 0, 0, torch.where(top.isinf(), 254, scale))
        size = (blocks.abs() * torch.exp2(127.0 - scale)).clamp(max=largest)
        number = (size.view(torch.int32) + 1).view(torch.float32).to(of)  # halves, made a place larger, are rounded up
        visible = number.to(torch.float32)
        low = torch.floor(((size - visible) / self._unit(visible)).clamp(-(2**15), 2**15 - 1) + 0.5)
        wrong = top.isnan()
        codes = number.view(torch.uint8) | torch.where(blocks.signbit(), 0x80, 0).to(torch.uint8)
        codes = torch.where(wrong, 0x7F, codes)
        self.codes.copy_(codes.view(self.codes.shape))
        self.scale.copy_(torch.where(wrong, NAN, scale).view(self.scale.shape))
        self.low.copy_(torch.where(wrong, 0, low).view(self.low.shape))

    def _unit(self, visible: Tensor) -> Tensor:
        """Return 2^-16 of the last place of each code."""
        kind = KINDS[self.kind]
        exponent = (torch.frexp(visible).exponent - 1).clamp(min=kind.lowest)
        return torch.exp2((torch.where(visible == 0, kind.lowest, exponent) - (kind.mantissa + BITS)).float())

    def read(self, exact: bool = True) -> Tensor:
        """Return the numbers in fp32: all bits of them, or those that layers see."""
        codes = self.codes.view(*self.scale.shape, SHARING)
        size = (codes & 0x7F).view(KINDS[self.kind].dtype).to(torch.float32)
        if exact:
            size = size + self.low.view(size.shape) * self._unit(size)
        power = torch.exp2(self.scale.float() - 127).masked_fill(self.scale == NAN, torch.nan)
        found = (torch.where(codes > 0x7F, -size, size) * power.unsqueeze(-1)).view(self.codes.shape)
        return found.t() if self.turned else found

    def parts(self) -> dict[str, Any]:
        """Return what it is made of, as a file keeps it."""
        dtype = str(self.dtype).removeprefix("torch.")
        return {KIND: self.kind, "dtype": dtype, "turned": self.turned} | {
            name: getattr(self, name) for name in self.__tensor_flatten__()[0]
        }

    def _with(self, change: Callable[[Tensor], Tensor], turned: bool | None = None) -> Fp8Weight:
        turned = self.turned if turned is None else turned
        codes, scale, low = map(change, self._inner())
        return Fp8Weight(codes, scale, low, self.dtype, self.kind, turned)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func == Tensor.share_memory_:  # by its address, which it does not have
            for x in args[0]._inner():
                x.share_memory_()
            return args[0]
        if func != _SET_DATA or not isinstance(args[0], Fp8Weight):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        p, value = args
        if value.shape != p.shape or value.dtype != p.dtype:
            raise TypeError(
                f"an Fp8Weight of {p.dtype} {list(p.shape)} cannot become a tensor of {value.dtype} "
                f"{list(value.shape)}: convert the model first, then call fp8_weights, and create the optimizer"
            )
        if isinstance(value, Fp8Weight) and p._alike(value):
            p.codes, p.scale, p.low = value._inner()
        else:
            p.write(exact(value.detach()))
        return None

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[Any, Any] | None = None
    ) -> Any:
        kwargs, given = kwargs or {}, args[0] if args else None
        if isinstance(given, Fp8Weight):
            if change := given._change(func, kwargs):
                return given._with(change)
            if func in _TURNED:
                there = func(given.codes, *args[1:], **kwargs)
                return given._with(lambda x: x, given.turned ^ (there.stride() != given.codes.stride()))
            if func is _ops.copy_.default and isinstance(args[1], Fp8Weight) and given._alike(args[1]):
                for to, x in zip(given._inner(), args[1]._inner(), strict=True):
                    to.copy_(x)
                return given
        return _on_plain(func, args, kwargs)

    def _change(self, func: Any, kwargs: Mapping[str, Any]) -> Callable[[Tensor], Tensor] | None:
        """Return what an operator does to each of the three tensors; None if its result is not another weight."""
        device = kwargs.get("device")
        if func in _SAME:
            return lambda x: x
        if func is _ops.clone.default:
            return Tensor.clone
        if func is _ops._to_copy.default and kwargs.get("dtype") in (None, self.dtype):
            return lambda x: x.to(device or x.device, copy=True)
        if func is _ops.empty_like.default and self.is_meta:  # model.to_empty(device=...)
            return lambda x: torch.empty_like(x, device=device)
        return None

    def _inner(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.codes, self.scale, self.low

    def _alike(self, other: Fp8Weight) -> bool:
        return (self.kind, self.turned, self.codes.shape) == (other.kind, other.turned, other.codes.shape)


def _on_plain(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call an operator with plain tensors: what it writes is exact, and is written back; all else is what is seen."""
    _refuse_views(func)
    names = [a.name for a in func._schema.arguments]
    writes = {a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    first = next((x for k, x in given.items() if k in writes), None)
    written: list[tuple[Fp8Weight, Tensor]] = []

    def changed(x: Any) -> Any:
        if not isinstance(x, Fp8Weight):
            return x
        written.append((x, x.read()))
        return written[-1][1]

    new = {k: tree_map(changed, x) if k in writes else _seen(x, first) for k, x in given.items()}
    found = func(*(new[k] for k in names[: len(args)]), **{k: new[k] for k in kwargs})
    for x, value in written:
        x.write(value)
    return tree_map(lambda y: next((x for x, value in written if value is y), y), found)


def _seen(x: Any, beside: Any) -> Any:
    """Return an operand, or a list of these, that an operator reads: exact, in fp32, beside a weight that it writes."""
    if isinstance(x, (list, tuple)):
        of = beside if isinstance(beside, (list, tuple)) and len(beside) == len(x) else [beside] * len(x)
        return type(x)(map(_seen, x, of))
    wide = isinstance(beside, Fp8Weight) and isinstance(x, Tensor) and x.dtype == beside.dtype
    if isinstance(x, Fp8Weight):
        return x.read() if wide else x.read(exact=False).to(x.dtype)
    return x.float() if wide else x


def _refuse_views(func: Any) -> None:
    """Raise RuntimeError for an operator that returns a view."""
    if any(x.alias_info is not None and not x.alias_info.is_write for x in func._schema.returns):
        raise RuntimeError(
            f"an Fp8Weight has no views ({func}): what is written to one would be lost.  Take p.float() to read a "
            f"part, and p.copy_(...) of all of it to write; DistributedDataParallel and fully_shard, which flatten and "
            f"cut parameters, do not take one"
        )


def exact(p: Tensor) -> Tensor:
    """Return a weight as it is kept: all numbers of an Fp8Weight, in fp32, or the tensor itself."""
    return p.read() if isinstance(p, Fp8Weight) else p


def memory(p: Tensor) -> Tensor:
    """Return the tensor that kernels take for a parameter: the codes of an Fp8Weight, or itself."""
    return p.codes.view(dtype_of(p)) if isinstance(p, Fp8Weight) else p


def kept_with(p: Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a parameter with what an Fp8Weight has beside its codes, as fields of states are named."""
    return {**state, **dict(zip(OWN, (p.scale, p.low), strict=True))} if isinstance(p, Fp8Weight) else {**state}


def joined(content: Any) -> Any:
    """Return what `Fp8Weight.parts` were made of in a nest of lists and dicts."""

    def is_weight(x: Any) -> bool:
        return isinstance(x, dict) and KIND in x

    def join(x: Any) -> Any:
        if not is_weight(x):
            return x
        return Fp8Weight(x["codes"], x["scale"], x["low"], getattr(torch, x["dtype"]), x[KIND], x["turned"])

    return tree_map(join, content, is_leaf=is_weight)


def kept_without(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of an Fp8Weight without what is its own."""
    return {name: x for name, x in state.items() if name not in OWN}


def dtype_of(p: Tensor) -> torch.dtype:
    """Return the dtype by which a plan knows a parameter: its own, or one that stands for a kind of codes."""
    return KINDS[p.kind].known if isinstance(p, Fp8Weight) else p.dtype


torch.serialization.add_safe_globals([Fp8Weight])
