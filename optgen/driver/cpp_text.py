"""The C++ text of rules and of plans, and of the pairs whose steps take several stages."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache, partial

from optgen import passes
from optgen.backends import columns, cpp, cpp_stages, cpp_step_text, cpp_text
from optgen.driver import eager_text, kernel_text, targets, triton_text
from optgen.driver.pool import Pool
from optgen.driver.project import Maths
from optgen.driver.targets import Case
from optgen.formats.format import Master
from optgen.formats.masters import Native
from optgen.formats.plan import Plan, Storage
from optgen.ir import node as ir
from optgen.ir.node import Rewriter
from optgen.ir.program import Let, Step
from optgen.lang.spec import Spec
from optgen.lower import lower, lower_weight
from optgen.lower.codec import X
from optgen.ops import dtypes, spaces
from optgen.ops.dtypes import DType

PARAMS = (dtypes.bf16, dtypes.f16)
"""Dtypes of weights that plans keep in ways of their own; f32 is its own master."""


@dataclass
class Kernels:
    """The C++ kernels of one pair, of equal ones the first.

    kernels   tile functions, of sweeps and of the work between them
    steps     what the walk is told of the stages of a step
    uses      kernel -> the template that it is of, and its arguments
    """

    kernels: Pool = field(default_factory=Pool)
    steps: Pool = field(default_factory=Pool)
    uses: dict[str, str] = field(default_factory=dict)
    _steps: dict[object, Step] = field(default_factory=dict)
    _made: dict[object, str] = field(default_factory=dict)

    def add(self, spec: Spec, case: Case, maths: Maths, fast: Step, kernel: str, rule: Step | None = None) -> str:
        """Generate what `kernel`, the step of a case, is made of; it is passed the scalars of `rule`, else of `fast`.

        rule   the step whose stages the kernel has
        Returns the kernel that does the same and came first.
        """
        weight = f"weight_{case.param.torch}"
        step = self._step(spec, case, replace(case.storage, param=dtypes.f32, master=Native()), maths)
        if not _fits(step, fast, rule):
            weight, step = "weight_float32", self._step(spec, case, case.storage, maths)
        host = (rule or fast).host
        key = id(step), tuple(let.node.uid for let in host)
        if key not in self._made:
            self._made[key] = self._define(spec, case, step, host)
        use = f"{self._made[key]}<{weight}, Grad>"
        first = next((name for name, known in self.uses.items() if known == use), kernel)
        self.uses[first] = use
        return first

    def _define(self, spec: Spec, case: Case, step: Step, host: tuple[Let, ...]) -> str:
        """Define the template of a step; return its name."""
        name = targets.function_name(spec, case.flags)
        name += ("_small" if case.small else "") + ("_vector" if case.vector else "")
        source = targets.source_name(spec.loc.file)
        if not step.in_stages:
            only = step.stages[0].schedule
            make = partial(cpp.kernel, only, source=source, host=host)
            return self.kernels.add(f"{name}_kernel", make, [let.name for let in step.host])
        texts, stages = cpp_stages.Text(step, host, source), []
        for k, stage in enumerate(step.stages):
            if not stage.call:
                scalars = [let.name for let in stage.schedule.program.host]
                stages.append(self.kernels.add(f"{name}_kernel_{k + 1}", partial(texts.stage, k), scalars))
        return self.steps.add(f"{name}_step", partial(texts.whole, stages=stages))

    def _step(self, spec: Spec, case: Case, storage: Storage, maths: Maths) -> Step:
        """Return the step of a case; an f32 weight stands for one of any dtype."""
        key = tuple(sorted(case.flags.items())), case.small, case.vector, storage.param, storage.master
        if key not in self._steps:
            program = lower(spec, case.flags, storage, drawn=True)
            self._steps[key] = targets.placed(spec, passes.step(program, maths))
        return self._steps[key]

    @property
    def texts(self) -> list[list[str]]:
        """The definitions, and last the kernels by their names."""
        uses = [f"template <class Grad> using {name} = {made};" for name, made in self.uses.items()]
        return [*self.kernels.functions, *self.steps.functions, uses]


def _fits(step: Step, fast: Step, rule: Step | None) -> bool:
    """Return True if the open step is that of the case but for the weight: stages, what they leave, and scalars.

    A weight that is kept in blocks or packed is read with the states, as the program says.
    """
    weights = [b for b in fast.program.buffers if b.owner == "p"]
    plain = all(b.space == spaces.elem and not b.dtype.packed for b in weights)
    known = {let.node.uid for let in (rule or fast).host}
    alike = _shape(step) == _shape(fast) if rule is None else _stages(step) == _stages(rule)
    return plain and all(let.node.uid in known for let in step.host) and alike


def _stages(step: Step) -> object:
    """Return what a step has the same under every plan that does not divide it otherwise."""
    temps = [(b.name, b.space, b.reduction) for b in step.temps]
    return temps, [(s.space, s.level, s.call) for s in step.stages]


def _shape(step: Step) -> object:
    """Return what a step asks of the tables: what its stages store and leave."""
    temps = [(b.name, b.space, b.reduction) for b in step.temps]
    kept = {b.name for b in step.program.buffers if b.owner == "p"}
    stages = [
        (s.space, s.level, s.call, sorted({"p" if x.buffer in kept else x.buffer for x in s.schedule.sweep.stores}))
        for s in step.stages
    ]
    return temps, stages, [b for b in step.program.buffers if b.owner not in ("p", "g")]


@lru_cache(maxsize=256)
def weights(master: Master, maths: Maths) -> tuple[list[str], ...]:
    """Return the structs of how weights of 16 bits are kept; () where a part is in blocks or packed."""
    fields = [field for param in PARAMS for field in master.fields(param).values()]
    plain = all(f.per == 1 and f.space == "elem" and not f.dtype.packed for f in fields)
    return tuple(_weight(master, param, maths) for param in PARAMS) if plain else ()


def _weight(master: Master, param: DType, maths: Maths) -> list[str]:
    made = lower_weight(master, param)
    # What is stored was computed: a sum, to passes that ask.
    value = ir.op("add", ir.load(X, dtypes.f32, spaces.elem), ir.load("y", dtypes.f32, spaces.elem))
    encode = (made.encode or made.nearest).map(Rewriter(lambda n: value if n.op == "load" and n.attr == X else n))
    y = replace(encode.buffer(X), name="y")
    decode = passes.run(made.decode, maths)
    encode = replace(encode, buffers=(*encode.buffers, y))
    bits, doc = master.noise_bits(param), master.describe(param)
    return cpp.weight(f"weight_{param.torch}", decode, passes.run(encode, maths), value, bits, doc)


def texts(plan: Plan, maths: Maths, kernels: Kernels) -> list[list[str]]:
    """Return the definitions of kernels.cpp, in order; weights that no kernel has are left out."""
    used = " ".join(kernels.uses.values())
    found = weights(plan.master, maths)
    return [*(w for w, p in zip(found, PARAMS, strict=False) if f"<weight_{p.torch}," in used), *kernels.texts]


# -- single sweeps

RULE, CODECS, STAGES = "kernels.h", "codecs.h", "kernels.cpp"
"""The files of a rule, of a plan, and of the two where steps take several sweeps."""


def _header(lines: list[str], structs: list[list[str]]) -> str:
    return columns.cpp("\n".join([*lines, "// clang-format off", *(x for s in structs for x in ("", *s))]) + "\n")


@lru_cache(maxsize=256)
def rule_text(spec: Spec, maths: Maths, plan: Plan | None = None) -> str:
    """Return the text of generated/<rule>/kernels.h, and of that file of a plan that divides steps; "" without one."""
    file = targets.source_name(spec.loc.file)
    made = kernel_text.rule_kernels(spec, maths, plan)
    nonneg = {s.name for s in spec.states if s.nonneg}
    structs: dict[str, list[str]] = {}
    for setting in made.settings:
        single = kernel_text.is_single(setting.step) and not setting.step.program.is_sized and plan is None
        for kernel in setting.kernels:
            stage = made.stages[kernel]
            if kernel in structs or stage.call:
                continue
            if single:
                structs[kernel] = cpp_text.rule_struct(stage.schedule, kernel, nonneg, file)
            else:
                structs[kernel] = cpp_step_text.stage_function(stage, kernel, nonneg, setting.whole)
    head = [f"//{line[1:]}" for line in kernel_text.header_of(spec, plan, f"cpp, {maths} maths")]
    return _header(head, list(structs.values())) if structs else ""


@lru_cache(maxsize=256)
def codec_text(plan: Plan, maths: Maths) -> str:
    """Return the text of a plan's C++ codecs."""
    found = list(triton_text.codecs(plan, maths))
    structs = [table] if (table := cpp_text.table_lines(codec for _, codec, _, _ in found)) else []
    known = {name for name, _, _, _ in found}
    bits = {name: fmt.noise_bits for name, fmt in eager_text.formats(plan).items() if name not in known}
    structs += [cpp_step_text.whole_struct(name, n) for name, n in bits.items() if n]
    for name, codec, _, doc in found:
        structs += cpp_text.codec_structs(codec, name, doc)
    file = targets.source_name(plan.loc.file)
    head = [
        f"// @generated by optgen: edit {file}, not this file.  plan {plan.name} · C++ codecs, {maths} maths",
        "//",
        f"//   plan      {file}:{plan.loc.line}  sha256 {targets.digest(plan.loc.file)}",
    ]
    return _header(head, structs)
