"""The host scalars of a step's kernels as one list: the same value once, different values under different names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from optgen.base.names import unique
from optgen.ir import node as ir
from optgen.ir.node import Node, Rewriter
from optgen.ir.program import Let, Program
from optgen.passes.name import RESERVED


def merged(programs: Sequence[Program]) -> tuple[list[Program], tuple[Let, ...]]:
    """The programs with scalars renamed where two of them gave one name to two values, and all scalars in order."""
    by_node: dict[int, Let] = {}
    taken: set[str] = set()
    host: list[Let] = []
    out = []
    for program in programs:
        renamed: dict[str, str] = {}
        own = []
        for let in program.host:
            found = by_node.get(let.node.uid)
            if found is None:
                name = unique(let.name, taken | RESERVED) if let.name in taken else let.name
                taken.add(name)
                found = by_node[let.node.uid] = replace(let, name=name)
                host.append(found)
            if found.name != let.name:
                renamed[let.name] = found.name
            own.append(found)
        if renamed:
            program = program.map(Rewriter(partial(_renamed, renamed)))
        out.append(replace(program, host=tuple(own)))
    return [replace(program, scalars=frozenset(taken)) for program in out], tuple(host)


def _renamed(names: dict[str, str], node: Node) -> Node:
    return ir.sym(names[node.attr], node.dtype) if node.op == "sym" and node.attr in names else node


def locals_of(programs: Sequence[Program]) -> tuple[Let, ...]:
    """The author's named host values of all programs, each once."""
    found: dict[int, Let] = {}
    for program in programs:
        for let in program.host_locals:
            found.setdefault(let.node.uid, let)
    return tuple(found.values())
