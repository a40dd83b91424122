"""Steps counted on the device (capturable=True), in Triton's interpreter.

The launches are the ones that a GPU gets; tensors lie on the CPU.  What is compared bit by bit are kernels that take
equal fp32 scalars: the host's fp64 powers and logarithms are the C library's, the device's are torch's, and they may
differ in the last place of fp64.
"""

import copy
import json
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

import triton
import triton.language as tl

import optgen
from optgen import optim
from optgen.formats import Blocked, LogMinMax, Plan, Split, scales, softsign
from optgen.optim import AdamW, Muon
from optgen.runtime import Optimizer
from optgen.runtime.gpu import compiled, device_steps
from optgen.runtime.records import keys
from optgen.runtime.records import scalars as host
from optgen.runtime.work import counting
from tests import training
from tests.harness import python
from tests.training import bits, copies, params_of, through_file
from tests.training import give_in_place as give

SHAPES = [(3, 20), (2, 32), (9,)]

CODED = Plan(
    "int8_split24 in small blocks, for tensors of any size.",
    name="coded",
    master=Split(8, "stochastic"),
    signed=Blocked(8, 16, softsign(1), scales.ue8m8, relative=True),
    nonneg=LogMinMax(8, 16),
    small_numel=0,
)

STEPS = 2


def parameters(dtype: torch.dtype = torch.bfloat16, shapes: Any = SHAPES) -> list[nn.Parameter]:
    return training.parameters(shapes, dtype, seed=1)


def everything(opt: Optimizer) -> object:
    """The bits of parameters and states; numbers and 0-dim tensors of them alike."""

    def number(x: object) -> object:
        return x.item() if isinstance(x, Tensor) and x.ndim == 0 and x.dtype in (torch.int64, torch.float64) else x

    states = [{k: number(x) for k, x in sorted(opt.state.get(p, {}).items())} for p in params_of(opt)]
    return bits([params_of(opt), states])


def trained(cls: type[Optimizer], steps: int = STEPS, shapes: Any = None, **options: Any) -> Optimizer:
    params = parameters(shapes=shapes or shapes_of(cls))
    opt = cls(params, **{"backend": "triton", **options})
    for step in range(steps):
        give(params, step)
        opt.step()
    return opt


def shapes_of(cls: type[Optimizer]) -> list[tuple[int, ...]]:
    return [(4, 6), (3, 8)] if cls.SPEC == "came" else SHAPES  # its sweeps take the interpreter long


# -- the arithmetic ---------------------------------------------------------------------------------------------
@triton.jit
def key_of(words, out):
    tl.store(out, device_steps.step_key(tl.load(words), tl.load(words + 1)))


@pytest.mark.parametrize("seed", [0, 1, -5, 2**63 + 7])
def test_keys_of_a_device_are_the_hosts(seed: int) -> None:
    out = torch.zeros(1, dtype=torch.int32)
    for step in (1, 2, 1000, 2**31, 2**40):
        key_of[(1,)](torch.tensor([step, keys.stream_of_steps(seed)]), out)
        assert out.item() == keys.step_key(seed, step)


def tensor(x: float) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


# -- the same steps -----------------------------------------------------------------------------------------------
RULES: list[tuple[str, dict[str, Any]]] = [
    ("AdamW", {"plan": "coded"}),
    ("AdamW", {"plan": "bf16_sr", "decouple_lr": True, "maximize": True}),  # peak_lr is a host state
    ("NAdam", {"plan": "fp32"}),  # mu_product likewise
    ("RAdam", {"plan": "fp32"}),  # a condition on the step
    ("LAMB", {"plan": "fp32"}),
    ("CAME", {"plan": "fp32"}),
    ("Prodigy", {"plan": "fp32"}),
    ("Muon", {"plan": "fp32"}),
]
CASES = [pytest.param(name, options, id=f"{name}-{options['plan']}") for name, options in RULES]


@cache
def class_of(name: str, plan: str) -> type[Optimizer]:
    found: type[Optimizer] = getattr(optim, name)
    return optgen.compile(found.SPEC, plan=CODED) if plan == "coded" else found


@pytest.mark.parametrize(("name", "options"), CASES)
def test_steps_counted_on_the_device_are_the_same_steps(name: str, options: dict[str, Any]) -> None:
    """Bits of parameters and states, the numbers as numbers and as tensors."""
    cls = class_of(name, options["plan"])
    plain = trained(cls, **options)
    counted = trained(cls, capturable=True, **options)
    assert everything(counted) == everything(plain)
    for p in params_of(counted):
        entry = counted.state[p]
        assert entry["step"].dtype == torch.int64
        assert all(isinstance(x, Tensor) for x in entry.values())
    assert len({id(counted.state[p]["step"]) for p in params_of(counted)}) <= 2  # small tensors, and large ones
    if cls.SPEC == "muon":  # its numbers of iterations are the host's
        return
    group = plain.param_groups[0]
    given = {
        name: tuple(tensor(x) for x in group[name]) if isinstance(group[name], tuple) else tensor(group[name])
        for name in (h.name for h in cls.HYPERS if all(f.nonzero != h.name for f in cls.FLAGS))
        if not isinstance(group[name], bool)
    }
    assert everything(trained(cls, capturable=True, **options, **given)) == everything(plain)


class Reads(TorchDispatchMode):
    """Refuses what would make the host wait for a device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default), func
        assert func is not torch.ops.aten.equal.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize(("name", "options"), CASES)
def test_nothing_is_read_on_the_way(
    name: str, options: dict[str, Any], short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cls = class_of(name, options["plan"])
    launched: list[object] = []
    monkeypatch.setattr(compiled, "start", lambda kernel, *_, **__: launched.append(kernel))
    opt = trained(cls, 0, capturable=True, lr=torch.tensor(1e-3), **options)
    for step in range(3):
        give(params_of(opt), step)
        if not short:
            opt._stepper.plans.forget()
        with Reads() if step else nullcontext():
            opt.step()
    assert len(launched) % 3 == 0
    assert launched
    assert {opt.state[p]["step"].item() for p in params_of(opt)} == {3}


def written_by_the_user(opt: Optimizer, count: Tensor) -> None:
    count.add_(37)


def captured(opt: Optimizer, count: Tensor) -> None:
    """Write the tensors as a graph does between steps of the host, without moving their versions."""
    with capture():
        give(params_of(opt), 50)
        opt.step()
    torch.from_numpy(count.numpy())[()] = 20  # numpy shares the memory, not the version


@pytest.mark.parametrize("change", [written_by_the_user, captured])
def test_counts_that_something_else_has_changed_are_followed(change: Any) -> None:
    opt = trained(AdamW, 4, plan="fp32", capturable=True)
    count = opt.state[params_of(opt)[0]]["step"]
    assert opt._stepper.plans.kept
    change(opt, count)
    for step in (4, 5):
        plain = AdamW(copies(opt), plan="fp32", backend="triton")
        plain.load_state_dict(opt.state_dict())
        for group in plain.param_groups:
            group["capturable"] = None
        for one in (opt, plain):
            give(params_of(one), step)
            one.step()
        assert everything(opt) == everything(plain)


def test_the_watch_sees_what_a_step_on_the_host_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    opt = trained(AdamW, 1, plan="fp32", lr=torch.tensor(1e-3))
    monkeypatch.setattr(compiled, "start", lambda *_, **__: None)
    with pytest.raises(AssertionError, match="_local_scalar_dense"), Reads():
        opt.step()


@pytest.mark.parametrize("done", [1, 4])
def test_without_it_a_rate_on_the_device_is_read_once_a_step(done: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where parameters take several launches, and on the fast path."""
    opt = trained(AdamW, done, plan="int8", shapes=[(3, 20), (64, 64)], lr=torch.tensor(1e-3))
    monkeypatch.setattr(compiled, "start", lambda *_, **__: None)
    read: list[object] = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            read.extend([func] * (func is torch.ops.aten._local_scalar_dense.default))
            return func(*args, **(kwargs or {}))

    with Seen():
        opt.step()
    assert len(read) == 1


@pytest.mark.parametrize("who", [{0}, {0, 1}, {1}])
def test_parameters_that_miss_a_step_are_not_counted(who: set[int]) -> None:
    """One tensor counts several parameters for as long as they step together."""
    sides = []
    for capturable in (False, True):
        opt = trained(AdamW, 1, plan="fp32", capturable=capturable, decouple_lr=True)
        params = params_of(opt)
        for step in range(1, 4):
            give(params, step)
            if step == 2:
                for k in who:
                    params[k].grad = None
            opt.step()
        sides.append(opt)
    assert everything(sides[0]) == everything(sides[1])
    opt = sides[1]
    counts = [opt.state[p]["step"] for p in params_of(opt)]
    assert [x.item() for x in counts] == [3 if k in who else 4 for k in range(3)]
    assert len({id(x) for x in counts}) == 2


# -- copies and checkpoints -----------------------------------------------------------------------------------------
def loaded(capturable: bool) -> Callable[[Optimizer], Optimizer]:
    def copier(opt: Optimizer) -> Optimizer:
        other = AdamW(copies(opt), plan="bf16_sr", backend="triton", capturable=capturable)
        other.load_state_dict(through_file(opt.state_dict()))
        assert bool(other.param_groups[0].get("capturable")) == capturable
        return other

    return copier


COPIERS = [copy.deepcopy, lambda opt: pickle.loads(pickle.dumps(opt)), loaded(True), loaded(False)]


@pytest.mark.parametrize("copier", COPIERS)
@pytest.mark.parametrize("before", [False, True])
def test_copies_and_checkpoints_go_on_alike_in_both_ways_of_counting(copier: Any, before: bool) -> None:
    opt = trained(AdamW, plan="bf16_sr", decouple_lr=True, capturable=before)
    other = copier(opt)
    for one in (opt, other):
        give(params_of(one), 7)
        one.step()
    assert everything(other) == everything(opt)
    after = bool(other.param_groups[0].get("capturable"))
    ours, theirs = ([one.state[p]["step"] for p in params_of(one)] for one in (opt, other))
    assert all(isinstance(x, Tensor) == after for x in theirs)
    if after and before:  # counts of its own, and as few
        assert len({*map(id, theirs)}) == len({*map(id, ours)}) and {*map(id, theirs)}.isdisjoint(map(id, ours))


# -- graphs -----------------------------------------------------------------------------------------------------------
@contextmanager
def capture() -> Iterator[None]:
    """Let the block see a CUDA graph being captured."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counting, "capturing", lambda: True)
        yield


def test_what_a_graph_uses_stays_as_it_is() -> None:
    """Gradients that lie elsewhere during the capture get tables of their own; steps outside are not disturbed."""
    opt, plain = (trained(AdamW, plan="bf16_sr", capturable=True) for _ in range(2))
    first = list(opt._stepper.launcher.used.values())
    for p in params_of(opt):
        p.grad = p.grad.clone()
    with capture():
        opt.step()
    plain.step()
    captured = opt._stepper.launcher.captured
    assert [x for entry in captured if isinstance(entry, tuple) for x in entry[1]]
    assert list(opt._stepper.launcher.used.values()) == first  # the graph's are its own
    for one in (opt, plain):
        give(params_of(one), 8)
        one.step()
        one.step()
    assert everything(opt) == everything(plain)
    with capture():  # nothing has moved: the tables of the last step
        opt.step()
    plain.step()
    assert everything(opt) == everything(plain)
    assert len(opt._stepper.launcher.captured) > len(first)


def test_a_graph_and_every_stream_have_numbers_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph runs when it likes, and by then kept numbers may be gone; a stream does not wait for another's."""
    monkeypatch.setattr(host, "_constants", {})
    one, x = tensor(1.0), 0.1234
    kept = host._like(x, one)
    assert host._like(x, one) is kept
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "_initialized", True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert host._like(x, one) is not kept
        assert host._like(x, one).item() == x
    monkeypatch.setattr(host, "_stream", lambda device: 7)
    other = host._like(x, one)
    assert other is not kept
    assert host._like(x, one) is other


def refused(opt: Optimizer) -> None:
    before = everything(opt)
    with (
        capture(),
        pytest.raises(RuntimeError, match=r"a CUDA graph is being captured, but .* make a step with the sa"),
    ):
        opt.step()
    assert everything(opt) == before


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("backend", ["triton", "cpp", "reference"])
def test_what_a_graph_cannot_repeat_is_refused(backend: str, capturable: bool) -> None:
    opt = trained(AdamW, 0, plan="fp32", capturable=capturable, backend=backend)
    give(params_of(opt), 0)
    refused(opt)  # no state yet
    opt.step()
    assert type(opt.state[params_of(opt)[0]]["step"]) is (Tensor if backend == "triton" and capturable else int)
    if backend != "triton" or not capturable:
        refused(opt)
        return
    params_of(opt)[0].grad = None
    refused(opt)  # another table
    give(params_of(opt), 1)
    other = copy.deepcopy(opt)
    give(params_of(other), 1)
    refused(other)  # tables are not copied
    opt.step()


def test_a_new_group_is_stepped_once_before_a_capture() -> None:
    opt = trained(AdamW, plan="fp32", capturable=True)
    opt.add_param_group({"params": parameters(shapes=[(5,)])})
    give(params_of(opt), 3)
    refused(opt)
    opt.step()
    with capture():
        opt.step()


def test_numbers_on_the_device_are_held_to_their_range_when_the_optimizer_is_made_alone() -> None:
    with pytest.raises(ValueError, match="lr must be >= 0"):
        AdamW(parameters(), lr=torch.tensor(-1.0), capturable=True)
    opt = trained(AdamW, plan="fp32", lr=torch.tensor(0.1), capturable=True)
    opt.param_groups[0]["lr"].fill_(-1.0)
    with Reads():
        opt.step()
    assert {opt.state[p]["step"].item() for p in params_of(opt)} == {STEPS + 1}


def test_steps_that_differ_by_their_number_are_refused() -> None:
    from optgen.lang import lookahead
    from specs.sgd import sgd

    cls = optgen.compile(lookahead(sgd), plan="fp32")
    with pytest.raises(ValueError, match="a CUDA graph repeats one step"):
        cls(parameters(), capturable=True)


def test_matrix_functions_want_numbers() -> None:
    params = parameters(shapes=[(12, 20)])
    opt = Muon(params, plan="fp32", backend="triton", capturable=True, ns_steps=torch.tensor(5.0))
    give(params, 0)
    with pytest.raises(RuntimeError, match="give it as a number"):
        opt.step()


LAUNCHED = """
import json
import torch, triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from optgen.optim import SGD
from optgen.runtime.gpu import compiled
from optgen.runtime.gpu.compiled import launched
from optgen.runtime.layout import plans
from optgen.runtime.work import counting

class Device:
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0

driver.set_active(Device())
kernels = compiled.kernels(plans.load(SGD, "fp32"))
fn = kernels.sgd_float32
count = fn.arg_names.index("SWEEP") - 2 - ("step_key" in fn.arg_names)
tables = torch.zeros(16, dtype=torch.int64), torch.zeros((8, 2), dtype=torch.int32)
found = []
for grad, tiles, lines in ((tl.bfloat16, 4, 1), (tl.float32, 8, 1), (tl.float32, 8, 1), (tl.float32, 8, 3)):
    scalars = counting.Control(count, torch.device("cpu"), lines)
    sweep = kernels.CONSTANTS["sgd_float32"]["SWEEP"]
    constants = {"SWEEP": launched(sweep, grad=grad, tiles=tiles, aligned=True)}
    call = compiled.Call(fn, *tables, range(count), "step_key" in fn.arg_names, constants, {})
    outer, given, told = compiled._outer(call, scalars)
    made = outer.warmup(*given, grid=(1,), **told, enable_fp_fusion=False, num_warps=1)
    found.append([len(outer.device_caches[0][0]), "bf16" in made.asm["ttir"], len(made.asm["cubin"]) > 0])
print(json.dumps([triton.__version__, found]))
"""

OLDEST = Path(sys.prefix) / "oldest"  # the oldest Triton that is supported, by `make setup`
NO_OLDEST = pytest.mark.skipif(not OLDEST.is_dir(), reason="the oldest Triton is not installed: make setup")


@pytest.mark.parametrize("oldest", [False, pytest.param(True, marks=NO_OLDEST)])
def test_the_kernel_around_a_kernel_compiles_as_it_is_launched(compiling: dict[str, str], oldest: bool) -> None:
    """From the very arguments of a launch, of which Triton makes the types itself: once for each set of constants, and
    for one line of scalars or several."""
    path = os.pathsep.join([str(OLDEST)] * oldest + [compiling.get("PYTHONPATH", "")])
    env = {**compiling, "PYTHONPATH": path}
    version, found = json.loads(python(LAUNCHED, env=env))
    assert (version == triton.__version__) != oldest or triton.__version__.startswith("3.6.")
    assert found == [[1, True, True], [2, False, True], [2, False, True], [3, False, True]]


def test_a_graph_of_what_ranks_agree_on_is_refused() -> None:
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        p = nn.Parameter(DTensor.from_local(torch.ones(2, 64), mesh, [Shard(0)]))
        p.grad = torch.ones_like(p)
        opt = optim.LAMB([p], plan="fp32", backend="triton", capturable=True)
        with capture(), pytest.raises(RuntimeError, match="ranks agree on who has gradients"):
            opt.step()
        assert not opt.state
    finally:
        torch.distributed.destroy_process_group()
