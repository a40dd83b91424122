"""A case of each error that a user can cause, by its code: the text of a file, or a call in a small project."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from textwrap import indent
from typing import Any

import torch

import optgen
from optgen.driver import standalone
from optgen.driver.build import Request, build
from optgen.driver.checkpoints import convert, verify
from optgen.driver.cli import _choice, _flags
from optgen.driver.load import find_plan, find_spec, load
from optgen.driver.new import new
from optgen.driver.project import read_config

PRELUDE = "from optgen.formats import *\nfrom optgen.lang import *\nfrom optgen.ops import dtypes\n\n"
LR = "lr=hyper(1e-3, ge=0)"
M = f"p, g, m=state(), *, {LR}"
MATRIX = f"{LR}, matrix=shape_flag(lambda shape: len(shape) >= 2)"
STEP = "p = p - lr * m\nreturn p, m"


def rule(lines: str = "m = 0.9 * m + g", signature: str = M, end: str = STEP, head: str = "@optimizer") -> str:
    """Return the text of a rule: its lines, and those that end it."""
    body = indent(f"{lines}\n{end}".strip(), "    ")
    return f"{head}\ndef mistaken({signature}):\n{body}\n"


def plain(weight: str, signature: str = f"p, g, *, {LR}", head: str = "@optimizer") -> str:
    """Return the text of a rule without states whose new weight is an expression."""
    return rule(f"p = {weight}", signature, "return p", head)


def declared(signature: str) -> str:
    """Return the text of a rule whose signature is at fault."""
    return rule(signature=signature)


def weights(function: str) -> str:
    """Return the text of a rule that is evaluated with what a function gives."""
    return f"{function}\n\n\n{rule(head='@optimizer(evaluate=average)')}"


def storing(plan: str, traced: str) -> str:
    """Return the text that looks for the storage of a rule's states under a plan."""
    return f"{plan}\n\n\n{traced}\n\nplan.storage(mistaken.states, dtypes.bf16, small=False)\n"


TEXTS = {
    # values of a rule
    "E101_if": rule("m = 0.9 * m + g\nif m > 1:\n    m = g"),
    "E101_swallowed": "import contextlib\n\n" + rule("with contextlib.suppress(Exception):\n    m = g if m > 0 else m"),
    "E102_equal": rule("m = 0.9 * m + g * (m == g)"),
    "E102_index": rule("m = 0.9 * m + g[0]"),
    "E102_math": f"import math\n\n{plain('p - lr * math.sqrt(g)')}",
    "E102_numpy": f"import numpy as np\n\n{plain('p - lr * np.dot(g, g)')}",
    "E103_bool": plain("p - lr * g * (g > 0)"),
    "E103_condition": plain("p - lr * where(g, 1.0, 0.0)"),
    "E103_draw": plain('p - lr * where(normal(0, "row") < 0.5, g, 0.0)'),
    "E103_key": plain("p - lr * normal(g, lr)", head='@optimizer(matrix="heads")'),
    "E103_matrix": plain("p - lr * inverse_root(g @ g.T, norm(g)) @ g", head='@optimizer(matrix="heads")'),
    "E103_order": plain("p - lr * inverse_root(g @ g.T, 0) @ g", head='@optimizer(matrix="heads")'),
    "E103_tight": plain("p - lr * where(p > 0 & g > 0, g, 0.0)"),
    "E104_exponent": plain('p - lr * abs(g) ** float("inf")'),
    "E104_large": plain("p - lr * where(abs(g) < 1e39, g, 0.0)"),
    "E104_text": plain("p - lr * g * 'often'"),
    "E105_function": rule(
        "best = maximum(g, m) if momentum else maximum(g, m)", f"p, g, m=state(when='momentum'), *, {LR}, "
        "momentum=flag(False)", "p = p - lr * best\nreturn p, m",
    ),
    "E105_returned": rule("m = g", f"p, g, m=state(when='momentum'), *, {LR}, momentum=flag(False)"),
    "E106_or": rule(
        "if fresh or probed:\n    g = g * probe * product",
        f"p, g, probe=input(), product=input(), *, {LR}, fresh=flag(fed='product'), probed=flag(fed='probe')",
        "p = p - lr * g\nreturn p",
    ),
    # declarations
    "E110_needs": declared(f"p, g, m=state(), *, {LR}, nesterov=flag(False, needs='momntum')"),
    "E110_normalized_by": declared(f"p, g, m=state(normalized_by='v'), *, {LR}"),
    "E110_rank": declared(f"p, g, m=low_rank_state('rows', rank='width', when='matrix'), *, {MATRIX}"),
    "E110_start": declared(f"p, g, m=state(init='parm'), *, {LR}"),
    "E110_when": declared(f"p, g, m=state(when='amsgrd'), *, {LR}, amsgrad=flag(False)"),
    "E111_bare": declared("p, g, m=state(), *, lr=1e-3"),
    "E111_side": declared("p, g, m=state(), lr=hyper(1e-3), *, eps=hyper(1e-8)"),
    "E111_uncalled": declared(f"p, g, m=state, *, {LR}"),
    "E112_range": declared("p, g, m=state(), *, lr=hyper(-1e-3, ge=0)"),
    "E113_class": "@optimizer\nclass Rule:\n    pass\n",
    "E113_doc": declared('p, g, m=state(), *, lr=hyper(1e-3, ge=0, doc="the\\nrate")'),
    "E113_end": declared('p, g, m=state(), *, lr=hyper(1e-3, ge="0")'),
    "E113_fed": declared(f"p, g, x=input(), y=input(), *, {LR}, fresh=flag(fed=('x', 'y'))"),
    "E113_flags": declared(f"p, g, m=state(), *, {LR}, {', '.join(f'a{k}=flag()' for k in range(11))}"),
    "E113_infinite": declared('p, g, m=state(), *, lr=hyper(float("inf"), gt=0)'),
    "E113_interval": declared(f"p, g, m=state(), *, {LR}, k=hyper(2.5, ge=1), sync=flag(every='k')"),
    "E113_list": declared("p, g, m=state(), *, lr=hyper([1e-3, 1e-4], ge=0)"),
    "E113_matrix": rule(head='@optimizer(matrix="rows")'),
    "E113_name": rule(head='@optimizer(name="My Rule")'),
    "E113_nul": rule(r'"""Steps of size \0.1."""'),
    "E113_range": declared("p, g, m=state(), *, lr=hyper(1e-3, ge=0, gt=0)"),
    "E113_start": declared(f"p, g, m=state(init=float('nan')), *, {LR}"),
    "E113_start_below": declared(f"p, g, m=state(nonneg, init='start'), *, {LR}, start=hyper(0.1)"),
    "E113_trait": declared(f"p, g, m=state(0.5), *, {LR}"),
    "E113_yields": rule("m = 0.9 * m + g", end="yield p"),
    "E114_leaves": declared(f"param, grad, m=state(), *, {LR}"),
    "E115_called": declared("p, g, m=state(), *, root=hyper(1e-3)"),
    "E115_prefix": declared(f"p, g, in_m=state(), *, {LR}"),
    "E115_spelled": rule().replace("mistaken", "MisTaken"),
    "E115_step": declared(f"p, g, m=state(), *, {LR}, t=hyper(3.0)"),
    "E115_twice": rule("m, beta2 = betas\nm = m * g", f"p, g, m=state(), *, {LR}, betas=hyper((0.9, 0.99))"),
    "E115_underscore": declared(f"p, g, m_=state(), *, {LR}"),
    "E116_flag": declared(f"p, g, m=state(), *, {LR}, nesterov=flag(False)"),
    "E116_hyper": declared(f"p, g, m=state(), *, {LR}, eps=hyper(1e-8)"),
    "E116_state": rule("", f"p, g, m=state(), *, {LR}", "p = p - lr * g\nreturn p, m"),
    "E117_unpacking": rule(
        "beta1, beta2, beta3 = betas\nm = beta1 * m + (1 - beta2) * g + beta3",
        f"p, g, m=state(), *, {LR}, betas=hyper((0.9, 0.99))",
    ),
    "E118_flag": f"{rule()}\n\nmistaken.trace({{'nestorov': True}})\n",
    "E118_hyper": f"{rule()}\n\nmistaken.evaluate(0.5, 0.1, 1, momentum=0.9)\n",
    "E119_root": declared(f"p, g, m=state(normalized_by='v'), v=row(nonneg), *, {LR}").replace("p, m\n", "p, m, v\n"),
    "E120_expression": rule(end="return p - lr * m, m"),
    "E120_name": rule("new = 0.9 * m + g", end="p = p - lr * new\nreturn p, new"),
    "E120_none": rule(end="p = p - lr * m"),
    "E124_number": rule("p = p - lr * m * g\nm = 1.0", end="return p, m"),
    "E124_space": rule("r = 0.9 * r + g * g", f"p, g, r=row(nonneg), *, {LR}", "p = p - lr * g / (1 + r)\nreturn p, r"),
    "E124_yes_or_no": rule("m = m * g > 0", end="p = p - where(m, lr, 0.0)\nreturn p, m"),
    "E125_shape": "from optgen.driver.emit import class_row\n\nLEAST = 2\n\n\n" + rule(
        "if wide:\n    m = 0.9 * m + g",
        f"p, g, m=state(when='wide'), *, {LR}, wide=shape_flag(lambda shape: len(shape) >= LEAST)",
        "p = p - lr * (m if wide else g)\nreturn p, m",
    ) + "\n\nclass_row(mistaken, ('fp32',))\n",
    "E126_every": declared(f"p, g, m=state(when='sync'), *, {LR}, k=hyper(5, ge=1), sync=flag(every='k')"),
    "E127_if": weights("def average(p, m):\n    return m if m > p else p"),
    "E127_none": weights("def average():\n    return 0"),
    "E127_number": rule(head="@optimizer(evaluate=3)"),
    "E127_reads": weights("HALF = 0.5\n\n\ndef average(p, m):\n    return HALF * (p + m)"),
    "E127_returns": weights("def average(p, m, *, lr):\n    return 1 - lr"),
    "E127_takes": weights("def average(p, other):\n    return (p + other) / 2"),
    # a rule as a whole
    "E128_global": "SEEN = []\n\n\n" + rule("SEEN.append(1)\nm = m + len(SEEN) * g"),
    "E129_blocks": plain("p - lr * newton_schulz(g)", head='@optimizer(matrix="blocks")'),
    "E129_half": rule(
        "if matrix:\n    g = inverse_root(g @ p.T, 2) @ g", f"p, g, *, {MATRIX}", "p = p - lr * g\nreturn p",
        '@optimizer(matrix="heads")',
    ),
    "E129_vector": plain("p - lr * newton_schulz(g)", head='@optimizer(matrix="heads")'),
    "E131_column": plain("p - é * g").replace("    p = ", "    é = lr * learning\n    p = "),
    "E131_exit": rule("raise SystemExit('no further')"),
    "E131_import": f"del sqrt\n\n\n{plain('p - lr * sqrt(abs(g))')}",
    "E131_method": rule("m = m.mul_(0.9) + g"),
    "E131_misspelt": rule("m = 0.9 * m + gg"),
    "E131_step": plain("p - lr * g / (1 - 0.9**t)"),
    "E131_undeclared": plain("p * (1 - lr * weight_decay) - lr * g"),
    "E132_lambda": f"mistaken = optimizer()(lambda p, g, *, {LR}: p - lr * g)\n",
    "E132_no_source": f"exec(compile({rule()!r}, '<typed in>', 'exec'), {{**globals(), '__name__': 'typed_in'}})\n",
    "E140_constant": plain("p - lr * log(1 + tanh(g))"),
    "E140_correction": rule(
        "m = beta * m + (1 - beta) * g\nlr = lr / sqrt(1 - beta**t)",
        f"p, g, t, m=state(), *, {LR}, beta=hyper(0.9, ge=0, le=1)",
    ),
    "E140_division": rule("m = 0.9 * m + g * g", end="p = p - lr * g / sqrt(m)\nreturn p, m"),
    "E140_host": plain("p - where(t > 1, lr / (t - 1), lr) * g", f"p, g, t, *, {LR}"),
    "E140_overflow": plain("p - 1e60 * lr * g"),
    "E140_power": plain("p - lr * g**1.5"),
    "E140_reduced": plain("p - lr * g * (norm(p) / norm(g))"),
    "E142_negative": declared(f"p, g, m=state(nonneg), *, {LR}"),
    "E143_trait": rule(
        "if matrix:\n    m = 0.9 * m + 0.1 * (g @ p.T)\n    g = m @ g",
        f"p, g, m=matrix_state('rows', symmetric, when='matrix'), *, {MATRIX}", "p = p - lr * g\nreturn p, m",
    ),
    # spaces
    "E201_number": plain("p - lr * g / row_sum(0.5)"),
    "E201_space": plain("p - lr * g / (1 + col_mean(row_mean(g)))"),
    "E202_power": plain("p - lr * abs(p) ** g"),
    "E205_bits": "from optgen.lang.values import log2\n\n\n" + plain("p - lr / (1 + log2(t)) * g", f"p, g, t, *, {LR}"),
    "E206_product": plain("p - lr * (p @ g)"),
    "E206_shapes": plain("p - lr * sqrt(abs(g.T))"),
    "E206_square": plain("p - lr * eigenvectors(g)", head='@optimizer(matrix="heads")'),
    # formats and plans
    "E301_slot": 'plan = Plan("8-bit moments.", signed=LogMinMax())\n',
    "E301_unsigned": storing(
        'roots = Blocked(8, 64, linear, signed=False)\nplan = Plan("Roots.", overrides={"m": roots})', rule()
    ),
    "E302_blocks": storing(
        'plan = Plan("Two sizes.", signed=Blocked(8, 64), nonneg=LogMinMax(8, 32))',
        declared(f"p, g, m=state(), v=state(nonneg), *, {LR}").replace("p, m\n", "p, m, v\n"),
    ),
    "E303_rows": storing(
        'plan = Plan("Rows in blocks.", overrides={"m": Blocked(8, 64)})', declared(f"p, g, m=row(nonneg), *, {LR}")
    ),
    "E305_bits": "Blocked(9, 64)\n",
    "E305_class": 'Plan("8-bit moments.", overrides={"exp_avg": Blocked})\n',
    "E305_float8": 'Fp8("e3m4")\n',
    "E305_master": 'Plan("bf16 weights.", master=floats.bf16)\n',
    "E305_scale": 'Blocked(scale="ue8m8")\n',
    "E305_text": 'Plan("8-bit moments.", signed="int8")\n',
    "E307_stagnates": "from optgen.verify import lint\n\n" + storing(
        'plan = Plan("bf16 moments, to nearest.", signed=floats.bf16, nonneg=floats.bf16, small_numel=0)',
        rule("m = 0.999 * m + 0.001 * g * g", f"p, g, m=state(nonneg), *, {LR}"),
    ) + "lint.check(mistaken, plan, plan.storage(mistaken.states, dtypes.bf16, small=False))\n",
    "E308_suffix": storing(
        'plan = Plan("8-bit moments.", signed=Blocked())',
        declared(f"p, g, m_scale=state(nonneg), m=state(), *, {LR}").replace("p, m\n", "p, m_scale, m\n"),
    ),
    "E309_dunder": 'Plan("It would take the place of a package\'s own file.", name="__init__")\n',
    "E309_name": 'Plan("Elsewhere.", name="../elsewhere")\n',
    "E309_nameless": 'import optgen\n\noptgen.compile("sgd", plan=Plan("8-bit momentum.", signed=Blocked()))\n',
    "E309_nul": 'Plan("half of a character: \\ud800")\n',
    "E309_overrides": 'Plan("8-bit moments.", overrides=[Blocked()])\n',
    "E311_bits": "codebooks.dynamic(bits=16)\n",
    "E311_long": "Codebook(codebooks.dynamic(), 4)\n",
    "E311_nan": 'Codebook((-1.0, float("nan"), 1.0), 2)\n',
    "E311_order": "Codebook((-1.0, 0.0, 0.66, 0.33, 1.0), 3)\n",
    "E311_range": "Codebook((-2.0, 0.0, 2.0), 2)\n",
    # files
    "E401_syntax": "def broken(p, g:\n    return p\n",
    "E402_misspelt": "lr = hypr(1e-3)\n",
    "E402_raises": "import math\n\nHALF = math.sqroot(0.25)\n",
    "E403_empty": "HALF = 0.5\n",
    "E405_several": f"{rule()}\n\n{rule().replace('mistaken', 'another')}",
}
"""A file of which loading, checking its specs or looking for the only one raises the error."""


def _foreign_checkpoint() -> None:
    torch.save({"state": {}, "param_groups": [{"params": [], "lr": 0.1}]}, "run.pt")
    convert("run.pt", "out.pt", to="int8_split24")


def _bare(p: Any, g: Any) -> Any:
    return p - g


def _twice(name: str) -> str:
    return PRELUDE + rule(head='@optimizer(name="Plain")').replace("mistaken", name)


CALLS: dict[str, tuple[dict[str, str], Callable[[], object]]] = {
    "E310_override": (
        {"specs/plans.py": f'{PRELUDE}mine = Plan("Mine.", overrides={{"exp_avgg": floats.bf16}})\n'},
        lambda: find_plan("mine"),
    ),
    "E404_file": ({"rules/mine.py": ""}, lambda: find_spec("rules/mien.py")),
    "E404_plan": ({}, lambda: find_plan("int8_splt24")),
    "E404_spec": ({}, lambda: find_spec("adamv")),
    "E406_edited": ({"generated/lion/__init__.py": "mine = True\n"}, lambda: build(Request(("lion",), ("fp32",)))),
    "E407_entry": ({"pyproject.toml": '[tool.optgen]\nmath = "fast"\n'}, lambda: read_config(Path.cwd())),
    "E408_exists": ({"specs/mine.py": "HALF = 0.5\n"}, lambda: new("mine")),
    "E409_name": ({"specs/mine.py": ""}, lambda: new("2fast")),
    "E409_path": ({"specs/mine.py": ""}, lambda: new("../mine")),
    "E411_choice": ({}, lambda: _choice("--maths", "fats", ("strict", "fast"))),
    "E411_flagless": ({}, lambda: _flags(find_spec("lion"), ["amsgrad"])),
    "E411_function": ({}, lambda: optgen.compile(_bare)),
    "E412_plan": (
        {"specs/plans.py": f'{PRELUDE}int8 = Plan("4-bit second moments.", nonneg=LogMinMax(4))\n'},
        lambda: find_plan("int8"),
    ),
    "E412_twice": (
        {f"specs/{name}.py": _twice(name) for name in ("first", "second")},
        lambda: build(Request(("first", "second"), ("fp32",))),
    ),
    "E413_folder": ({"generated": "a file, not a folder"}, lambda: build(Request(("adamw",)))),
    "E413_long": ({}, lambda: build(Request(out="o" * 300))),
    "E414_nothing": ({"README.md": "no specs here"}, lambda: build(Request())),
    "E415_damaged": ({"generated/MANIFEST.json": '{\n<<<<<<< HEAD\n'}, lambda: build(Request(("lion",), ("fp32",)))),
    "E415_outside": (
        {"generated/MANIFEST.json": '{"files": {"../../precious.txt": "0"}, "specs": {}}'},
        lambda: build(Request(("lion",), ("fp32",))),
    ),
    "E417_missing": ({}, lambda: verify("run.pt")),
    "E417_spec": ({"specs/mine.py/helper.py": ""}, lambda: load(Path("specs/mine.py"))),
    "E418_format": ({"ours.txt": ""}, _foreign_checkpoint),
    "E419_model": (
        {"specs/mine.py": PRELUDE + plain("p - lr * g / (1 + model_norm(g))")},
        lambda: standalone.text(find_spec("specs/mine.py"), find_plan("int8_split24")),
    ),
}  # fmt: skip
"""The files of a project, and a call in its folder that raises the error."""
