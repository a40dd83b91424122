"""Triton's interpreter, quicker: what it computes again for every operation is kept, what nobody reads is left out.

A kernel of a few hundred elements spends nearly all its time in the interpreter's bookkeeping: the type of each result
is built anew, its shape is wrapped and unwrapped, and every integer sum is done twice more for an overflow check whose
result is dropped (`device_assert` does nothing outside of debug mode).  None of that decides a bit of what a kernel
stores; tests/test_interpreter.py holds the quick interpreter to the plain one.  Three things do: of two zeros the plain
one's minimum and maximum are the second, a device's the one that is smaller or larger by its sign; a condition of one
number that meets a block is a float in the plain one, which then has no `&` and `|`; and it widens subnormal bf16 to
other numbers.

`quicken()` is called by a process that interprets, before its first kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

Change = tuple[Any, str, Any]
"""An object, the name of an attribute, and what it is to be."""


def changes() -> list[Change]:
    """All that `quicken` sets."""
    from triton.runtime import interpreter

    builder, splat = interpreter.interpreter_builder, interpreter.interpreter_builder.create_splat
    return [
        *_types(),
        (interpreter, "_get_np_dtype", _numpy_types()),
        (interpreter, "_convert_float", _widening(interpreter._convert_float)),
        (interpreter, "_patch_lang", _patch_once()),
        (builder, "options", replace(builder.options, sanitize_overflow=builder.options.debug)),
        (builder, "create_splat", lambda kind, x: _of_condition(splat(kind, x), x)),
        (builder, "create_minimumf", lambda a, b: builder.binary_op(a, b, _ordered(np.minimum, np.bitwise_or))),
        (builder, "create_maximumf", lambda a, b: builder.binary_op(a, b, _ordered(np.maximum, np.bitwise_and))),
    ]


def _of_condition(made: Any, x: Any) -> Any:
    """A block of copies of x, which are truths where x is one."""
    if x.data.dtype == np.bool_:
        made.data = made.data.astype(np.bool_)
    return made


def _widening(plain: Callable[..., Any]) -> Callable[..., Any]:
    """The interpreter's conversion of floats, bf16 to fp32 by its bits."""

    def convert(x: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (source.name, target.name) != ("bf16", "fp32"):
            return plain(x, source, target, rounding)
        return x.view(np.uint16).astype(np.uint32) << 16

    return convert


def _ordered(limit: Callable[[Any, Any], Any], of_bits: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """NumPy's minimum or maximum with -0 below +0, as min.NaN.f32 has it; NumPy gives the second of two zeros."""

    def limited(a: Any, b: Any) -> Any:
        bits = np.dtype(f"i{a.dtype.itemsize}")
        zeros = of_bits(a.view(bits), b.view(bits)).view(a.dtype)
        return np.where(a == b, zeros, limit(a, b))

    return limited


def _indexed(plain: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Triton 3.6 takes an index from an array of one element, which NumPy 2.4 refuses: no kernel of a loop runs in its
    plain interpreter either."""

    def patch(tensor: Any, scope: Any) -> None:
        plain(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    return patch


_originals: list[Change] = []


def originals() -> list[Change]:
    """Return what `quicken` has replaced."""
    return list(_originals)


def quicken() -> None:
    """Makes this process's interpreter quick."""
    from triton.runtime import interpreter

    if _originals:
        return
    interpreter._patch_lang_tensor = _indexed(interpreter._patch_lang_tensor)
    made = changes()
    _originals.extend((owner, name, getattr(owner, name)) for owner, name, _ in made)
    for owner, name, value in made:
        setattr(owner, name, value)


def _types() -> list[Change]:
    """Types and shapes of values, made once for each kind of value."""
    from triton.language import core, semantic

    block, tensor = core.block_type, core.tensor
    plain_block, plain_unwrap = block.__init__, core._unwrap_if_constexpr
    plain_broadcast = semantic.TritonSemantic.broadcast_impl_value
    plain_operands = semantic.TritonSemantic.binary_op_type_checking_impl
    shapes: dict[tuple[int, ...], tuple[Any, int, Any, Any, str]] = {}
    none = (core.constexpr(1), core.tuple([]))

    def unwrap(value: Any) -> Any:
        if type(value) is core.constexpr:
            return value.value
        return plain_unwrap(value) if isinstance(value, list | tuple | core.tuple | core.constexpr) else value

    def block_init(self: Any, element_ty: Any, shape: Any) -> None:
        key = tuple(
            [s if type(s) is int else unwrap(s) for s in (shape.values if type(shape) is core.tuple else shape)]
        )
        found = shapes.get(key)
        # Equal numbers are one key: True and 1.0 are refused as they were.
        if found is None or not all(type(s) is int for s in key):
            plain_block(self, element_ty, shape)
            wrapped = core.tuple([core.constexpr(s) for s in self.shape])
            shapes[key] = (self.shape, self.numel, wrapped, core.constexpr(self.numel), str(self.shape))
            return
        self.element_ty = element_ty
        self.shape, self.numel = found[:2]
        self.name = f"<{found[4]}, {element_ty}>"

    def tensor_init(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        if type.is_block():
            self.shape, self.numel = shapes[tuple(type.shape.values)][2:4]
        else:
            self.numel, self.shape = none

    def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        a, b = lhs.type, rhs.type
        if a.is_block() and b.is_block() and a.shape.values == b.shape.values:
            return lhs, rhs
        return plain_broadcast(self, lhs, rhs)

    constants: dict[Any, Any] = {}
    usual = {d.name: d.is_floating() for d in (core.float32, core.int32, core.uint32, core.int64)}

    def constant(self: Any, value: Any, like: Any) -> Any:
        """The number as a block like another one; 0.0 and -0.0 are one key, so zeros are made anew."""
        key = type(value), value, like.dtype.name, tuple(like.type.shape.values) if like.type.is_block() else ()
        found = constants.get(key)
        if found is None:
            found = plain_operands(self, like, value)[1]
            found.handle.data.flags.writeable = False
            if value:
                constants[key] = found
        return found

    def operands(self: Any, lhs: Any, rhs: Any, *allowed: Any, **more: Any) -> tuple[Any, Any]:
        """Two of one type need no other; beside a tensor of numbers, a number of its kind has the tensor's type."""
        a, b = type(lhs), type(rhs)
        if a is tensor is b:
            if (name := lhs.dtype.name) == rhs.dtype.name and name in usual:
                return self.broadcast_impl_value(lhs, rhs)
        elif a is tensor and (b is int or b is float and usual.get(lhs.dtype.name)) and lhs.dtype.name in usual:
            return lhs, constant(self, rhs, lhs)
        elif b is tensor and (a is int or a is float and usual.get(rhs.dtype.name)) and rhs.dtype.name in usual:
            return constant(self, lhs, rhs), rhs
        return plain_operands(self, lhs, rhs, *allowed, **more)

    return [
        (semantic.TritonSemantic, "binary_op_type_checking_impl", operands),
        (semantic.TritonSemantic, "broadcast_impl_value", broadcast),
        (core, "_unwrap_if_constexpr", unwrap),
        (block, "__init__", block_init),
        (tensor, "__init__", tensor_init),
    ]


def _numpy_types() -> Callable[[Any], Any]:
    """NumPy's type for one of Triton's, by name: the interpreter fills a table of all of them at each question."""
    from triton import language as tl
    from triton.runtime import interpreter

    plain = interpreter._get_np_dtype
    known: dict[str, Any] = {}

    def numpy_type(kind: Any) -> Any:
        kind = kind.element_ty if isinstance(kind, tl.block_type) else kind
        found = known.get(kind.name)
        if found is None:
            found = known[kind.name] = plain(kind)
        return found

    return numpy_type


def _patch_once() -> Callable[[Any], Any]:
    """The interpreter replaces each function of the language by its own at a launch, and looks for them all again at
    every call of a device function.  Here only where some are not replaced yet."""
    from triton.runtime import interpreter

    patch, nothing = interpreter._patch_lang, interpreter._LangPatchScope()
    plain = {m: m.load for m in (interpreter.tl, interpreter.tl.core)}  # a module's functions are replaced together
    of_function: dict[Any, list[Any]] = {}

    def patch_once(fn: Any) -> Any:
        modules = of_function.get(fn)
        if modules is None:
            modules = [m for m in plain if any(value is m for value in fn.__globals__.values())]
            of_function[fn] = modules
        for module in modules:
            if module.load is plain[module]:
                return patch(fn)
        return nothing if modules else patch(fn)

    return patch_once
