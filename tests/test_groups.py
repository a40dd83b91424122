"""Groups share launches: one line of scalars for each group and count of steps, the bits of buckets of their own."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

import optgen
from optgen import optim
from optgen.lang import lookahead
from optgen.runtime import Optimizer
from optgen.runtime.cpu import cpu, native
from optgen.runtime.gpu import compiled
from optgen.runtime.layout import workspace
from optgen.runtime.options.options import Numbers
from optgen.runtime.work import counting
from optgen.runtime.work.counting import Lines
from specs.sgd import sgd
from tests import training
from tests.harness import imported
from tests.test_capturable import class_of, everything
from tests.training import give_in_place as give
from tests.training import params_of

SHAPES = [(3, 20), (2, 32), (9,), (4, 16), (3, 20)]


def in_groups(
    cls: Any, backend: str, apart: bool = False, tensors: bool = False, shapes: Any = SHAPES, **options: Any
) -> Optimizer:
    """Make an optimizer of a group for each parameter; apart: in buckets of their own."""
    groups: list[dict[str, Any]] = []
    for k, p in enumerate(training.parameters(shapes, torch.bfloat16, seed=1)):
        lr = 1e-2 * (1 + k % 3)
        groups.append({"params": [p], "lr": torch.tensor(lr) if tensors else lr, "seed": k % 2, "maximize": k == 3})
        groups[-1] |= {"workspace": workspace.USUAL - k} if apart else {}
    opt: Optimizer = cls(groups, backend=backend, **options)
    return opt


def run(opt: Optimizer, steps: int) -> int:
    """Make steps; rates change, and one parameter misses the second.  Return the buckets of the last."""
    schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)
    for step in range(steps):
        give(params_of(opt), step)
        first = params_of(opt)[0]
        kept, first.grad = first.grad, None if step == 1 else first.grad
        opt.step()
        first.grad = kept
        schedule.step()
    return len(opt._stepper.launcher.used)


CASES = [("AdamW", "coded", 1), ("NAdam", "fp32", 1), ("LAMB", "fp32", 1), ("Muon", "fp32", 2), ("Prodigy", "fp32", 1)]
"""Rules with random bits, states of the host, norms, products of matrices, and sums over the model; their kernels."""


@pytest.mark.parametrize("backend", ["cpp", "triton", "reference"])
@pytest.mark.parametrize(("rule", "plan", "kernels"), CASES)
def test_groups_share_launches(rule: str, plan: str, kernels: int, backend: str) -> None:
    sides = []
    for apart in (False, True):
        opt = in_groups(class_of(rule, plan), backend, apart, **({} if plan == "coded" else {"plan": plan}))
        assert run(opt, 3) == (0 if backend == "reference" else len(SHAPES) if apart else kernels)
        sides.append(everything(opt))
    assert sides[0] == sides[1]


def test_a_backend_that_one_group_asks_for_is_had_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPTGEN_BACKEND")
    monkeypatch.setattr(cpu, "kernels", lambda buckets: [native.Unavailable("no compiler")] * len(buckets))
    groups = [{"params": [nn.Parameter(torch.ones(3))], "backend": x} for x in ("auto", "cpp")]
    with pytest.raises(RuntimeError, match=r"backend='cpp', but .*no compiler"):
        training.train(optim.AdamW(groups, plan="fp32"), [0])


def test_rates_that_change_in_many_groups_make_no_new_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host computes the scalars of all groups at once."""
    opt, asked, of_lines = in_groups(optim.AdamW, "cpp", plan="fp32"), list[int](), counting._of_lines
    run(opt, 3)
    taken = training.planned_steps(monkeypatch)
    monkeypatch.setattr(counting, "_of_lines", lambda *given: asked.append(len(given[2])) or of_lines(*given))
    run(opt, 1)
    assert taken == [True] and asked == [len(SHAPES)]


@pytest.mark.parametrize("rule", ["AdamW", "NAdam", "RAdam", "AdaBelief", "Adafactor", "ScheduleFreeAdamW", "AdEMAMix"])
def test_scalars_of_lines_are_those_of_each_line(rule: str) -> None:
    """To the last bit, with other rates, exponents and counts of steps, and states of the host."""
    cls = getattr(optim, rule)
    opt = cls([{"params": [p]} for p in training.parameters([(4, 6)] * 6)], plan="fp32", backend="cpp")
    training.train(opt, [0])
    (variant,) = {one.bucket.variant for one in opt._stepper.plans.kept[0].parts}
    groups = [dict(group) for group in opt.param_groups]
    for k, (group, hyper) in enumerate(itertools.product(groups, cls.HYPERS)):
        if hyper.name in ("lr", "betas", "beta2_decay", "momentum_decay", "weight_decay", "r", "alpha"):
            shrunk = 1 - (7 * k % 11) / 97
            old = group[hyper.name]
            group[hyper.name] = tuple(x * shrunk for x in old) if isinstance(old, tuple) else old * shrunk
    for steps in ([7] * 6, [1, 2, 7, 7, 10_000, 3]):
        hosts = [tuple(0.3 / (k + 1) for _ in variant.host_names) for k in range(6)]
        whole = counting.on_host(variant, Lines([*range(6)], [*range(6)], steps, hosts), Numbers(cls, groups))
        alone = [
            counting.on_host(variant, Lines([0], [0], [step], [host]), Numbers(cls, [group]))
            for step, host, group in zip(steps, hosts, groups, strict=True)
        ]
        for k, one in enumerate(alone):
            assert whole.scalars.of(k).tobytes() == one.scalars.values.tobytes()
            assert (whole.scalars.keys[k], whole.scalars.counts[k]) == (one.scalars.keys[0], one.scalars.counts[0])
            assert repr(whole.after[k]) == repr(one.after[0])


@pytest.mark.parametrize("rule", ["AdamW", "NAdam"])
def test_steps_counted_on_the_device_ask_as_much_for_many_groups(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates are tensors there; the bits are those of numbers, and what is asked does not grow with the groups."""
    sides: list[Any] = []
    for more in ({"tensors": True, "capturable": True}, {}):
        run(opt := in_groups(getattr(optim, rule), "triton", plan="fp32", shapes=SHAPES[:2], **more), 3)
        sides.append(everything(opt))
    assert sides[0] == sides[1]
    asked: list[str] = []

    class Counted(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            asked.extend([func.name()] * (not func.is_view))
            return func(*args, **(kwargs or {}))

    monkeypatch.setattr(compiled, "start", lambda *_: None)
    for count in (2, 12):
        groups = [{"params": [p], "lr": torch.tensor(0.1)} for p in training.parameters([(4, 5)] * count)]
        opt = getattr(optim, rule)(groups, backend="triton", plan="fp32", capturable=True)
        training.train(opt, [0, 1])
        sides.append(len(asked))
        with Counted():
            opt.step()
    assert len(asked) - sides[3] == sides[3] - sides[2], asked


class Graph:
    """A stand-in for a CUDA graph: launches are kept, and made again with what lies in memory then."""

    def __init__(self, opt: Optimizer) -> None:
        self.launches: list[Any] = []
        with pytest.MonkeyPatch.context() as patch:
            for place in (counting, optgen.runtime.work.bucket):
                patch.setattr(place, "capturing", lambda: True)
            patch.setattr(compiled, "start", lambda *given: self.launches.append(given))
            opt.step()

    def replay(self) -> None:
        for given in self.launches:
            compiled.start(*given)


@pytest.mark.parametrize("rule", ["AdamW", "lookahead"])
def test_graphs_hold_rates_that_change_and_steps_of_every_kind(rule: str) -> None:
    """The recipe of docs/contract.md: each kind of step once by itself, then by its graph."""
    cls: Any = optgen.compile(lookahead(sgd), plan="fp32") if rule == "lookahead" else optim.AdamW
    more: dict[str, Any] = {"lookahead_k": 2} if rule == "lookahead" else {}
    opt, other = (in_groups(cls, "triton", plan="fp32", capturable=x, **more) for x in ("host", False))
    schedules, graphs = [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in (opt, other)], list[Graph]()
    for step in range(7):
        for one in (opt, other):
            give(params_of(one), step)
        number = opt.next_graph()
        assert (number is None) == (step < 2 + len(more) + 1), step
        if step < 2:
            opt.step()
        else:
            if number is None:
                before = everything(opt)
                graphs.append(Graph(opt))
                assert everything(opt) == before
                number = opt.next_graph()
            graphs[number or 0].replay()
        other.step()
        for schedule in schedules:
            schedule.step()
        assert everything(opt) == everything(other), step
    opt.param_groups[0]["lr"] = -1.0
    with pytest.raises(ValueError, match="lr must be >= 0"):
        opt.next_graph()
    opt.param_groups[0]["lr"] = 1e-2
    opt.load_state_dict(opt.state_dict())  # new states
    assert opt.next_graph() is None


def test_the_example_trains() -> None:
    """On the CPU, without graphs."""
    example = imported(Path(__file__).parents[1] / "examples" / "cuda_graph.py", "example_cuda_graph", known=True)
    model = example.network(torch.device("cpu"))
    losses = example.train(model, example.optimizer(model), 30)
    assert losses[-1] < losses[0]


def test_steps_that_no_graph_can_repeat_are_refused() -> None:
    opt = optim.SOAP([nn.Parameter(torch.ones(6, 5))], plan="fp32", precondition_frequency=1, capturable="host")
    opt.param_groups[0]["backend"] = "triton"
    training.train(opt, [0, 1])
    with pytest.raises(RuntimeError, match=r"functions of matrices wait for the device"):
        Graph(opt)
    with pytest.raises(TypeError, match="capturable"):
        optim.AdamW([nn.Parameter(torch.ones(3))], capturable="hosts")
