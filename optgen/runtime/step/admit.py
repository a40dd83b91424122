"""Checks of parameters and gradients before a step changes anything."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from optgen.runtime.checkpoint import checkpoint
from optgen.runtime.layout import plans, sharded_states, sharding
from optgen.runtime.layout.fp8_weight import Fp8Weight, dtype_of
from optgen.runtime.layout.plans import Label
from optgen.runtime.options import blocks
from optgen.runtime.options.entries import Entry
from optgen.runtime.records import Variant, dtype_name
from optgen.runtime.records.join import Pair
from optgen.runtime.records.warn import warn
from optgen.runtime.states import state, views

GRADS = frozenset({torch.float32, torch.bfloat16, torch.float16})
"""Gradient dtypes that kernels read; fp64 is converted to fp32."""

HEAD = re.compile(r"(^|\.)(lm_head|unembed(ding)?)(\.weight)?$|^(head|output)\.weight$")
EMBEDDING = re.compile(
    r"(^|\.)(wte|wpe|((tok|token|word|pos|position|token_type|input)_)?emb(ed(ding)?s?)?(_(tokens|positions|in|out))?)"
    r"(\.weight)?$"
)
APART = re.compile(f"{HEAD.pattern}|{EMBEDDING.pattern}")
"""Names of the output head and of embeddings.  Hidden layers of any model have others."""

Dtypes = dict[int, tuple[Tensor, torch.dtype]]
"""id(parameter) -> the parameter, and its dtype when it was admitted."""


# -- when parameters are given -----------------------------------------------------------------------------------------


def refuse_unsupported(cls: Any, p: Tensor) -> None:
    """Raise TypeError or ValueError for a trainable parameter that no kernel can update."""
    owner = cls.__name__
    if not p.requires_grad:
        return
    if torch.nn.parameter.is_lazy(p):
        raise ValueError(
            f"{owner}: a parameter of a lazy module has no shape yet, which its states follow: make a forward pass "
            f"with the model first, then create the optimizer"
        )
    if p.is_complex():
        raise TypeError(f"{owner} does not support complex parameters; optimize torch.view_as_real(p) instead")
    if p.layout is not torch.strided:
        raise TypeError(f"{owner} does not support parameters of layout {p.layout}")
    if state.wraps(p) and not isinstance(p, Fp8Weight):
        raise TypeError(
            f"{owner} does not support parameters of class {type(p).__name__}: they stand for other tensors and "
            f"have no memory that kernels could update; optimize those, or a plain copy"
        )
    if isinstance(p, Fp8Weight) and hasattr(cls, "ASCENT"):
        raise TypeError(
            f"{owner} does not support an Fp8Weight, which its first step would have to keep in 16 bits; wrap the "
            f"optimizer without it: optgen.SAM(opt)"
        )
    if state.overlaps(p):
        raise ValueError(
            f"{owner}: a parameter of shape {list(p.shape)} and strides {list(p.stride())} is an expanded view or "
            f"a sliding window: its elements overlap; optimize the tensor that it is a view of"
        )


def refuse_shared_memory(cls: Any, entries: Iterable[Entry]) -> None:
    """Raise ValueError if two trainable parameters have memory in common."""
    trained = [(entry.p, entry.name) for entry in entries if entry.p.requires_grad]
    found = state.alike([p for p, _ in trained])
    if found is not None and trained[found[0]][0] is not trained[found[1]][0]:  # torch says that one is in twice
        a, b = (state.label(*trained[i]) for i in found)
        raise ValueError(
            f"{cls.__name__}: {a} and {b} share memory, which both updates would write: tie weights by giving both "
            f"modules the same Parameter, or optimize the tensor that both are views of"
        )


def refuse_layouts(cls: Any, entries: Iterable[Entry]) -> None:
    """Raise ValueError for a parameter of several ranks, or of several matrices, whose parts no kernel can update."""
    for entry in entries:
        refuse_flattened(cls, entry.p, entry.name)
        sharded = sharding.is_sharded(entry.p)
        if entry.p.requires_grad and (sharded or entry.name in blocks.of(cls, entry.group)):
            _, plan, variant = checkpoint.select(cls, entry.group, entry.p, entry.name)
        if entry.p.requires_grad and sharded:
            shard(cls, plan, variant, entry, None)


def refuse_flattened(cls: Any, p: Tensor, name: Label) -> None:
    """Raise ValueError for a trainable piece of a flattened parameter, which has neither rows nor its own elements."""
    if p.requires_grad and getattr(p, "_fsdp_flattened", False):
        raise ValueError(
            f"{cls.__name__}: {state.label(p, name)} was flattened and cut by FullyShardedDataParallel, and its shape "
            f"is lost: use torch.distributed.fsdp.fully_shard"
        )


def refuse_views(cls: Any, entry: Entry, variant: Variant, divided: bool) -> None:
    """Raise ValueError for a parameter whose step cannot write its views, or the 8 bits that layers see of it."""
    problem = views.problem(entry.p, variant)
    reasons = {problem: bool(problem), "it is several matrices": divided}
    reasons["it is stepped on the host (offload=True)"] = bool(entry.group.get("offload"))
    if found := next((reason for reason, holds in reasons.items() if holds), ""):
        what, mend = "views", "keep it under a plan without views, by overrides={name: plan}"
        if isinstance(entry.p, Fp8Weight):
            what, mend = "codes", "leave it out of fp8_weights"
        raise ValueError(
            f"{cls.__name__}: the step cannot write the {what} of {state.label(entry.p, entry.name)}: {found}; {mend}"
        )


def refuse_vectors(cls: Any, entries: Iterable[Entry]) -> Entry | None:
    """Raise ValueError for a parameter without rows and columns if the rule needs them.

    Returns the first parameter of which nobody said that it is a stack of matrices, and which is taken for one.
    """
    found: Entry | None = None
    for entry in entries:
        p = entry.p
        if not p.requires_grad or p.ndim == 2:
            continue
        if p.ndim < 2 and checkpoint.select(cls, entry.group, p, entry.name)[2].needs_matrix:
            raise no_matrix(cls, p, entry.name)
        if found is None and checkpoint.is_stack(cls, entry.group, p, entry.name):
            found = entry if entry.name not in blocks.of(cls, entry.group) else None
    return found


def no_matrix(cls: Any, p: Tensor, name: Label) -> ValueError:
    return ValueError(
        f"{cls.__name__}: {state.label(p, name)} has no rows and columns, whose statistics this rule needs; "
        f"give such parameters to another optimizer"
    )


def warn_stack(cls: Any, entry: Entry) -> None:
    """Warn of a parameter of three dimensions that nobody said to be a stack of matrices."""
    count, name = entry.p.shape[0], repr(entry.name) if isinstance(entry.name, str) else "its name"
    fields = checkpoint.select(cls, entry.group, entry.p, entry.name)[2].fields
    shared = " and ".join(f.name for f in fields if f.space == "tensor" and not f.shared)
    warn(
        f"{cls.__name__} takes {state.label(entry.p, entry.name)} as a stack of {count} matrices, such as a layer's "
        f"experts, each by itself{shared and f', but for {shared}, which all of them have together'}.  Say so with "
        f"blocks={{{name}: {count}}}; if it is a convolution, one matrix of {count} rows, with blocks={{{name}: 1}}",
        cls,
    )


def warn_of(cls: Any, entries: Sequence[Entry], module: nn.Module | None = None) -> None:
    """Warn of parameters that are kept, or stepped, as they usually are not."""
    _warn_discouraged(cls, entries)
    _warn_embeddings(cls, entries, module)


def _warn_discouraged(cls: Any, entries: Iterable[Entry]) -> None:
    """Warn of plans that the lint finds an error in, once each, if they keep a state that it is about."""
    warned = set[str]()
    for entry in entries:
        p, group, label = entry.p, entry.group, entry.name
        if not p.requires_grad:
            continue
        name, pair, _ = plans.chosen(cls, group, label)
        if not pair.discouraged or name in warned:
            continue
        variant = checkpoint.select(cls, group, p, label)[2]
        found = [] if variant.small else [s for s in variant.states if s in pair.discouraged]
        if found:
            warned.add(name)
            other = f", such as {cls.DEFAULT_PLAN!r}" if name != cls.DEFAULT_PLAN else ""
            warn(
                f"{cls.__name__}: plan {name!r} is discouraged: `{found[0]}`: {pair.discouraged[found[0]]}.  Use "
                f"another plan{other}; `optgen check {cls.SPEC}` lists those without an error",
                cls,
            )


def _warn_embeddings(cls: Any, entries: Iterable[Entry], module: nn.Module | None) -> None:
    """Warn of embeddings and output heads that a rule steps as hidden matrices, by their names and the classes of their
    modules."""
    if not any(flag.name == "adamw" and not flag.derived for flag in cls.FLAGS):
        return
    modules = () if module is None else module.modules()
    tables = {id(m.weight) for m in modules if isinstance(m, (nn.Embedding, nn.EmbeddingBag))}
    found = [
        str(e.name) for e in entries
        if e.p.requires_grad and e.p.ndim == 2 and (id(e.p) in tables or APART.search(str(e.name)))
        and checkpoint.select(cls, e.group, e.p, e.name)[2].needs_matrix
    ]  # fmt: skip
    if found:
        warn(
            f"{cls.__name__} steps {', '.join(found[:4])}{', ...' if found[4:] else ''} as hidden matrices.  "
            f"Embeddings and output heads usually take AdamW at a rate of its own: give them a group "
            f"{{'params': [...], 'adamw': True, 'lr': 3e-4}}, or write optgen.make({cls.SPEC!r}, model), which sorts "
            f"parameters by what they are",
            cls,
        )


def warn_untrained(cls: Any, groups: Sequence[dict[str, Any]], steps: int) -> None:
    """Warn that several steps have found no gradient."""
    count = sum(len(group["params"]) for group in groups)
    warn(
        f"{cls.__name__}: {steps} steps, and none of its {count} parameters has had a gradient yet: these steps "
        f"changed nothing.  Is backward() called before step(), and zero_grad() after it?  Does the loss depend on "
        f"these very parameters, or on a copy of the model, or on one that was sharded or rebuilt after the optimizer "
        f"was made?",
        cls,
    )


# -- at a step ---------------------------------------------------------------------------------------------------------


def shard(
    cls: Any, plan: Pair, variant: Variant, entry: Entry, kept: state.State | None
) -> sharded_states.ShardedParameter:
    """Return how a DTensor lies over the ranks; `kept`: its state.

    Raises ValueError, before its first step, if no kernel can update its parts at every step.
    """
    p: Any = entry.p
    try:
        parts = sharded_states.ShardedStates.of(p, variant)
        if not kept:
            for other in plans.at_steps(plan, variant, cls.FLAGS):
                sharded_states.is_gathered(other, parts.layout)
    except ValueError as error:
        where = f"{tuple(p.placements)} over a mesh of {list(p.device_mesh.shape)}"
        raise ValueError(f"{cls.__name__}: {state.label(p, entry.name)}, {where}: {error}") from None
    owner = kept if kept is not None else {}
    return sharded_states.ShardedParameter(p, parts.layout, entry.position, owner, parts, parts.gathered)


def local_pair(cls: Any, p: Any, g: Tensor, name: Label) -> tuple[Tensor, Tensor]:
    """Return the parts of a DTensor and its gradient on this rank; errors name the parameter."""
    try:
        return sharded_states.pair(p, g)
    except (TypeError, ValueError, RuntimeError) as error:
        raise type(error)(f"{cls.__name__}: {state.label(p, name)}: {error}") from None


def check_pair(cls: Any, dtypes: Dtypes, p: Tensor, g: Tensor, name: Label) -> torch.dtype:
    """Return the dtype in which kernels read the gradient.

    Raises RuntimeError or TypeError for a parameter or a gradient that no kernel takes.
    """
    owner, known, dtype = cls.__name__, dtypes.get(id(p)), g.dtype
    if known is None:  # put into the group by somebody else, as sharding wrappers do
        refuse_unsupported(cls, p)
        known = dtypes[id(p)] = (p, dtype_of(p))
    if known[1] is not dtype_of(p):
        raise RuntimeError(
            f"{owner}: {state.label(p, name)} was {dtype_name(known[1])} when the optimizer was created: convert the "
            f"model first, then create the optimizer (and load the old one's dense_state_dict() into it)"
        )
    if g.layout is not torch.strided:
        raise RuntimeError(f"{owner} does not support sparse gradients: {state.label(p, name)} has one")
    if not g.is_floating_point():
        raise TypeError(f"{owner}: {state.label(p, name)} has a gradient of {dtype_name(dtype)}")
    if g.shape != p.shape or g.device != p.device:  # torch looks when p.grad is set, not when p.data is
        raise RuntimeError(
            f"{owner}: {state.label(p, name)} is on {p.device}, and its gradient is of shape {list(g.shape)} on "
            f"{g.device}: the parameter was given other memory (p.data = ...) after backward; compute the gradient anew"
        )
    return dtype if dtype in GRADS else torch.float32


def in_memory(cls: Any, p: Tensor, g: Tensor, name: Label, eager: bool) -> Tensor:
    """Return the gradient when it has arrived, with memory of its own if it is zeros without any.

    Raises TypeError or RuntimeError if it or the parameter has no address.
    """
    g = state.materialized(sharding.waited(g))
    for which, t in (("", p), ("the gradient of ", g)):
        if not which and isinstance(t, Fp8Weight):
            continue
        if state.wraps(t):
            raise TypeError(
                f"{cls.__name__}: {which}{state.label(p, name)} is of class {type(t).__name__}, which "
                f"stands for other tensors and has no memory of its own"
            )
        if not state.has_memory(t, eager):
            raise RuntimeError(
                f"{cls.__name__}: {which}{state.label(p, name)} has no memory: it was freed (its storage "
                f"was resized to 0, as what shards a model does between uses), or it never had any"
            )
    return g
