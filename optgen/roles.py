"""The roles of a model's parameters, by which rules of matrices sort: hidden matrices, embeddings, heads and others."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from glob import escape
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from optgen.runtime.layout import plans
from optgen.runtime.options import blocks
from optgen.runtime.options.overrides import bare
from optgen.runtime.step.admit import EMBEDDING, HEAD

ROLES = ("hidden", "lora_b", "lora_a", "embedding", "head", "stem", "vector")
"""In the order of groups.  The first two are matrices to a rule of matrices; what is no matrix is a vector."""

Named = Sequence[tuple[str, Tensor]]

ADAPTERS = re.compile(r"(^base_model\.model|\bmodules_to_save\.\w+|\boriginal_module|\bbase_layer)\.")
"""The parts of names that PEFT adds."""

NAMES = (
    ("lora_a", re.compile(r"(^|[._])lora_?(a|down)(\.|$)", re.I)),
    ("lora_b", re.compile(r"(^|[._])lora_?(b|up)(\.|$)", re.I)),
    ("head", HEAD),
    ("head", re.compile(r"^heads\.\w+(\.weight)?$")),
    ("embedding", EMBEDDING),
    ("embedding", TOKENS := re.compile(r"(^|[._])(emb(ed(ding)?)?s?|pos|tokens?|lora_embedding_[AB]\.\w+)$")),
    ("vector", re.compile(r"(^|[._])(bias\w*|norm\w*|A_log)(\.weight)?$")),
)
"""Roles by names, the first that holds.  TOKENS: in no layer of their own, and adapters of embeddings."""

FUSED = re.compile(r"(^|\.)(qkv(_proj)?|wqkv|to_qkv|w_pack|in_proj_weight|c_attn|query_key_value)(\.weight)?$", re.I)
BY_HEAD = ("query_key_value", "c_attn")
"""Fused matrices that hold the queries, keys and values of a head together, in some models."""


def sorts(cls: Any) -> bool:
    """Return True for a rule that has other steps for what is no hidden matrix, as Muon has those of AdamW."""
    if not hasattr(cls, "FLAGS"):  # a class of torch's
        return False
    flags = {flag.name for flag in cls.FLAGS if not flag.derived}
    return cls.BLOCKS == "heads" and bool(flags & {"adamw", "sign_norm"})


def groups(cls: Any, named: Named, found: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return a group for each role, with the options that its step needs under a rule that `sorts`; None: no such."""
    own: dict[str, dict[str, Any]] = {}
    if cls is not None and any(flag.name == "adamw" for flag in cls.FLAGS):
        own = {role: {"adamw": True} for role in ROLES[2:]}
    elif cls is not None:
        own = {"head": {"sign_norm": True}, "embedding": {"sign_norm": True, "normalized": False}}
    made = [{"params": [pair for pair in named if found[pair[0]] == role], "role": role, **own.get(role, {})}
            for role in ROLES]  # fmt: skip
    return [group for group in made if group["params"]]


def searched(pattern: Any) -> Callable[[str, Tensor], Any]:
    """Return the search for a regular expression, or a function, as a function of a name and a parameter."""
    try:
        expression = pattern if callable(pattern) and not isinstance(pattern, type) else re.compile(pattern)
    except (re.error, TypeError) as error:
        raise ValueError(f"make: {pattern!r} is no regular expression of names: {error}") from None
    return expression if callable(expression) else lambda name, _: expression.search(name)


def find(named: Named, model: nn.Module | None = None, asked: Mapping[Any, str] | None = None) -> dict[str, str]:
    """Return the role of each parameter, by name.

    model  tells by its layers what names do not: embeddings, norms, the first convolution and the last linear layer
    asked  the caller's, by regular expressions of names or functions (name, parameter): the first that holds wins

    ValueError for a role that there is not and for a pattern that no parameter has.
    """
    chosen: dict[str, str] = {}
    for key, role in (asked or {}).items():
        held = [name for name, p in named if searched(key)(name, p)]
        if not held:
            raise ValueError(f"make: sort[{key!r}]: matches no parameter")
        if role not in ROLES:
            raise ValueError(f"make: sort[{key!r}]: expected one of {', '.join(ROLES)}, got {role!r}")
        chosen = dict.fromkeys(held, role) | chosen
    layers = {} if model is None else _of_layers(model)
    found = {name: _role(ADAPTERS.sub("", bare(name)), p, layers.get(id(p), "")) for name, p in named} | chosen
    if [*found.values()].count("hidden") > 1 and "head" not in found.values():
        last = _last_linear(model)
        found |= {name: "head" for name, p in named if p is last and found[name] == "hidden"}
    return found | chosen


def _role(name: str, p: Tensor, layer: str) -> str:
    """Return the role of a parameter; `layer`: what its layer says."""
    if p.ndim < 2 or p.numel() == max(p.shape):
        return "embedding" if TOKENS.search(name) else "vector"
    by_name = next((role for role, names in NAMES if names.search(name)), "hidden")
    return by_name if by_name.startswith("lora") or not layer else layer


def _of_layers(model: nn.Module) -> dict[int, str]:
    """Return roles that follow from layers, by id of the parameter.  A tied head is an embedding."""
    first = next((m for m in model.modules() if isinstance(m, (nn.Linear, _ConvNd))), None)
    found = {id(first.weight): "stem"} if isinstance(first, _ConvNd) and first.groups == 1 else {}
    head = getattr(_unwrapped(model), "get_output_embeddings", lambda: None)()
    found[id(getattr(head, "weight", None))] = "head"
    for m in model.modules():
        role = "vector" if re.search(r"norm(\dd)?$", type(m).__name__, re.I) else ""
        role = "embedding" if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) else role
        found |= {id(p): role for p in m.parameters(recurse=False) if role}
    return found


def _last_linear(model: nn.Module | None) -> Tensor | None:
    """Return the weight of the last linear layer, unless that stands in a numbered module, as a block does, or ends
    attention."""
    named = () if model is None else model.named_modules()
    linear = [(bare(name), m.weight) for name, m in named if isinstance(m, nn.Linear) and "lora_" not in name]
    *parts, last = linear[-1][0].split(".") if linear else ("0", "")
    inside = last == "out_proj" or any(part.isdigit() for part in parts)
    return None if inside else linear[-1][1]


def _unwrapped(model: nn.Module) -> Any:
    """Return the model inside of torch.compile, DistributedDataParallel and PEFT."""
    inner: Any = model
    while isinstance(child := getattr(inner, "_orig_mod", getattr(inner, "module", None)), nn.Module):
        inner = child
    return inner.get_base_model() if hasattr(inner, "get_base_model") else inner


def config_of(model: nn.Module | None) -> Any:
    """Return the transformers config of a model's text part, or None."""
    config: Any = None if model is None else getattr(_unwrapped(model), "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def heads_of(config: Any) -> tuple[int, int, int]:
    """Return the numbers of heads of queries, and of keys, and the rows of each; zeros if no config says them."""
    many = getattr(config, "num_attention_heads", None)
    few = getattr(config, "num_key_value_heads", None) or getattr(config, "num_kv_heads", None) or many
    if not isinstance(many, int) or not isinstance(few, int):  # some have a number for each layer
        return 0, 0, 0
    return many, few, getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // many


def blocks_of(cls: Any, named: Named, roles: Mapping[str, str], model: nn.Module | None) -> dict[str, blocks.Count]:
    """Return the option `blocks` of matrices that share a parameter: queries, keys and values, gates, experts."""
    heads, found = heads_of(config_of(model)), dict[str, blocks.Count]()
    convolutions = [] if model is None else [id(m.weight) for m in model.modules() if isinstance(m, _ConvNd)]
    for name, p in (pair for pair in named if roles[pair[0]] == "hidden"):
        if p.ndim == 3:
            count: blocks.Count = 1 if id(p) in convolutions else p.shape[0] * ("expert" in name.lower())
        else:
            count = _split(cls, bare(name), p, heads)
        found |= {escape(name): count} if count else {}
    return found


def _split(cls: Any, name: str, p: Tensor, heads: tuple[int, int, int]) -> blocks.Count:
    """Return into what a parameter of two dimensions falls, or 0; heads: as of `heads_of`."""
    (many, few, size), rows, fused = heads, p.shape[0], FUSED.search(name)
    if fused is None:
        return 2 * (name.endswith("gate_up_proj.weight") and not rows % 2)
    if rows != (many + 2 * few) * size:
        return 3 * (fused[2] != BY_HEAD[0] and rows == 3 * p.shape[1])
    if fused[2] in BY_HEAD:
        return many + 2 * few
    variants = plans.load(cls, cls.DEFAULT_PLAN).variants
    if many == few or any(blocks.undivided(v) for v in variants if v.needs_matrix):
        return (many + 2 * few) // math.gcd(many, few)
    return many * size, few * size, few * size
