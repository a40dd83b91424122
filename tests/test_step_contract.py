"""The step as other tools see it: torch.compile, averaged models, options that are refused, layouts of gradients."""

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import all_reduce
from torch.testing._internal.two_tensor import TwoTensor

from optgen import optim
from optgen.optim import CAME, LAMB, AdamW, Muon
from optgen.runtime import Optimizer, files
from optgen.runtime.step import admit
from tests import training
from tests.harness import sampled


def test_a_compiled_step_is_compiled_once_while_the_rate_changes() -> None:
    found, frames = [], []
    for compiled in (False, True):
        (p,) = parameters((4, 6))
        opt = AdamW([p], lr=0.1, plan="fp32", backend="reference")
        schedule = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.1, total_steps=12)
        torch._dynamo.reset()
        counters.clear()
        step = torch.compile(opt.step, backend="eager") if compiled else opt.step
        for k in range(8):
            p.grad = torch.full_like(p, 0.5 - k)
            step()
            schedule.step()
            frames.append(counters["frames"]["total"])
        found.append(p)
    assert torch.equal(*found)
    assert frames[-1] == frames[9] > 0
    assert not counters["unimplemented"], counters
    torch._dynamo.reset()


def parameters(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    return training.parameters(shapes, seed=3)


BACKENDS = ["reference", "triton", "cpp"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(4, 2), (400, 4), (16,)])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_parameter_that_outgrew_its_gradient(backend: str, shape: tuple[int, ...], steps: int) -> None:
    """torch compares them when p.grad is set, and not when p.data is: kernels would read behind the gradient's end."""
    params = [nn.Parameter(torch.ones(4, 4)) for _ in range(2)]
    opt = AdamW([("a", params[0]), ("b", params[1])], backend=backend, plan="fp32")
    for p in params:
        p.grad = torch.ones_like(p)
    for _ in range(steps):
        opt.step()
    params[1].data = torch.ones(shape)
    before, states = params[0].detach().clone(), copy.deepcopy(opt.state_dict()["state"])
    with pytest.raises(RuntimeError, match=r"parameter 'b' .* its gradient is of shape \[4, 4\] on cpu"):
        opt.step()
    assert torch.equal(params[0], before) and bool((params[1] == 1).all())
    assert len(opt.state) == steps  # both parameters, or none
    kept = opt.state_dict()["state"]
    assert all(torch.equal(kept[0][key], states[0][key]) for key in ("exp_avg", "exp_avg_sq") if steps)


def test_a_gradient_on_another_device_is_refused() -> None:
    """torch takes p.data from a CPU to a GPU, and leaves the gradient; here the devices are a CPU and meta."""
    p, said = nn.Parameter(torch.ones(4, 4)), r"'w' .* is on cpu, and its gradient is of shape \[4, 4\] on meta"
    with pytest.raises(RuntimeError, match=said):
        admit.check_pair(AdamW, {}, p, torch.ones(4, 4, device="meta"), "w")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("start", [0, 8])
@pytest.mark.parametrize("which", ["parameter 1", "the gradient of parameter 1"])
@pytest.mark.parametrize("steps", [0, 3])
def test_memory_that_was_freed_is_not_read(backend: str, start: int, which: str, steps: int) -> None:
    """A view behind the start of what was freed has an address that is not 0, and no memory either."""
    params = [nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(16)[start : start + 8])]
    opt = AdamW(params, backend=backend, plan="fp32")
    for p in params:
        p.grad = torch.ones(16)[start : start + 8]
    for _ in range(steps):  # the last one by the short way
        opt.step()
    before, kept = params[0].detach().clone(), copy.deepcopy(opt.state_dict()["state"])
    freed = params[1] if which == "parameter 1" else params[1].grad
    freed.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=rf"AdamW: {which} \(float32 \[8\]\) has no memory: it was freed"):
        opt.step()
    assert torch.equal(params[0], before)
    assert {k: s["step"] for k, s in opt.state_dict()["state"].items()} == {k: s["step"] for k, s in kept.items()}


def test_empty_fake_and_meta_tensors_need_no_memory() -> None:
    """Eager torch steps them, as ever: a model's memory is measured so.  Kernels have nothing to work on."""
    for around in (nullcontext(), torch.device("meta"), FakeTensorMode()):
        with around:
            params = [nn.Parameter(torch.ones(64, 512)), nn.Parameter(torch.ones(0, 4))]
            for p in params:
                p.grad = torch.ones_like(p)
            opt = AdamW(params, backend="reference", plan="fp32")
            opt.step()
            assert opt.state[params[0]]["step"] == opt.state[params[1]]["step"] == 1
            assert type(opt.state[params[0]]["exp_avg"]) is type(torch.ones(1))
    nowhere = nn.Parameter(torch._efficientzerotensor((16, 8))[8:])
    nowhere.grad = torch.ones(8, 8)
    for ps in (params, [nowhere]):
        with pytest.raises(RuntimeError, match=r"AdamW: parameter 0 .* has no memory"):
            AdamW(ps, backend="cpp", plan="fp32").step()


def test_parameters_without_a_shape_are_refused_until_a_forward_pass() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))
    with pytest.raises(ValueError, match=r"AdamW: a parameter of a lazy module has no shape yet.* forward pass"):
        AdamW(model.parameters())
    model[0].weight.requires_grad = model[0].bias.requires_grad = False
    opt = AdamW(model.parameters(), plan="fp32", backend="reference")
    model(torch.ones(1, 3)).sum().backward()
    opt.step()
    assert len(opt.state) == 2


def test_tensors_that_stand_for_others_are_refused() -> None:
    def two(*shape: int) -> TwoTensor:
        return TwoTensor(torch.ones(shape), torch.ones(shape))

    with pytest.raises(TypeError, match="does not support parameters of class TwoTensor"):
        AdamW([nn.Parameter(two(4, 4))])
    params = [nn.Parameter(torch.ones(4, 4)), nn.Parameter(two(4, 4), requires_grad=False)]
    opt = AdamW(params, backend="cpp", plan="fp32")
    params[1].requires_grad_()
    params[0].grad, params[1].grad = torch.ones(4, 4), two(4, 4)
    with pytest.raises(TypeError, match=r"AdamW: parameter 1 .* is of class TwoTensor"):
        opt.step()
    assert bool((params[0] == 1).all()) and not opt.state
    with pytest.raises(TypeError, match=r"AdamW: the gradient of parameter 'w' .* is of class TwoTensor"):
        admit.in_memory(AdamW, params[0], params[1].grad, "w", True)  # which p.grad of a plain tensor does not take


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_are_waited_for(backend: str) -> None:
    """The result of a collective of torch's is at no address as long as nobody waits for it."""
    found = []
    for sent in (False, True):
        (p,) = parameters((5, 7))
        opt = AdamW([p], backend=backend, plan="fp32")
        for k in range(3):
            g = torch.full((5, 7), 1.0 + k)
            p.grad = all_reduce(g, "sum", torch.distributed.group.WORLD) if sent else g
            assert (type(p.grad) is Tensor) is not sent
            opt.step()
        found.append(p.detach())
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("view", "overlapping"),
    [
        (lambda: torch.randn(10).as_strided((4, 4), (2, 1)), True),
        (lambda: torch.randn(4, 1).expand(4, 3), True),
        (lambda: torch.randn(20).as_strided((3, 2), (2, 4)), True),  # 4 twice
        (lambda: torch.randn(6, 8, 3)[::2, :, 1:].permute(2, 0, 1), False),
        (lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), False),
        (lambda: torch.randn(0, 4), False),
    ],
)
def test_views_whose_elements_overlap_are_refused(view: Callable[[], Tensor], overlapping: bool) -> None:
    """The constructor refuses them; the first step refuses those that were frozen before, and changes nothing."""
    p = nn.Parameter(view())
    counted = torch.arange(p.untyped_storage().nbytes() // 4).as_strided(p.shape, p.stride(), p.storage_offset())
    assert (counted.unique().numel() < p.numel()) == overlapping
    with pytest.raises(ValueError, match="elements overlap") if overlapping else nullcontext():
        AdamW([p], plan="fp32")
    params = [nn.Parameter(torch.ones(4)), p.requires_grad_(False)]
    opt = AdamW(params)
    p.requires_grad_()
    for q in params:
        q.grad = torch.ones(q.shape)
    with pytest.raises(RuntimeError, match=r"parameter 1 .* is an expanded view") if overlapping else nullcontext():
        opt.step()
    assert bool((params[0] == 1).all()) is overlapping


def pairs() -> Iterator[tuple[str, Tensor, Tensor, bool]]:
    base = torch.randn(8, 12)
    yield "one beside the other", base[:3], base[3:], False
    yield "the same", base, base.view(12, 8), True
    yield "the first and the last row", base[0], base[-1:], False
    yield "inside", base, base[2:4, 3:5], True
    yield "columns beside one another, which are not told apart", base[:, :5], base[:, 5:], True
    yield "a row across columns", base[:, 3], base[2, 1:6], True
    yield "other dtypes", base[:, :5], base.view(torch.bfloat16)[:, 9:12], True


@pytest.mark.parametrize(("a", "b", "meet"), [pytest.param(*x[1:], id=x[0]) for x in pairs()])
@pytest.mark.parametrize("turned", [False, True])
def test_parameters_that_share_memory_are_refused(a: Tensor, b: Tensor, meet: bool, turned: bool) -> None:
    """Kernels step all tensors at once: two of them may not write one place.  torch takes turns, here they race."""
    plan = "fp32_master"
    params = [(name, nn.Parameter(t)) for name, t in (("a", a), ("b", b))]
    assert all(p.data_ptr() == t.data_ptr() for (_, p), t in zip(params, (a, b), strict=True))
    if turned:
        params.reverse()
    for default in ("cpu", "meta"):
        with torch.device(default), pytest.raises(ValueError, match="share memory") if meet else nullcontext():
            AdamW(params, plan=plan)
    opt = AdamW(params[:1], plan=plan)
    with pytest.raises(ValueError, match="share memory") if meet else nullcontext():
        opt.add_param_group({"params": params[1:]})
    assert len(opt.param_groups) == (1 if meet else 2)
    params[0][1].requires_grad_(False)
    AdamW(params, plan=plan)  # one of them is not written


@pytest.mark.parametrize(
    ("cls", "backend"),
    [(cls, x) for cls in (AdamW, CAME, LAMB, Muon) for x in BACKENDS if (cls, x) != (CAME, "triton")],
)
def test_steps_and_checkpoints_whatever_the_default_device(tmp_path: Path, cls: type[Optimizer], backend: str) -> None:
    """It is one for the user's tensors: tables, rooms and sums have devices of their own."""
    plan, dtype = ("fp32", torch.float32) if backend == "triton" else ("int8_split24", torch.bfloat16)
    found = []
    for default in (None, "meta"):
        shapes = ((4, 3), (9, 7)) if backend == "triton" else ((8, 4, 3, 3), (70, 65))  # interpreted
        params = [p.to(dtype).detach().requires_grad_() for p in parameters(*shapes)]
        for p in params:
            p.grad = torch.full_like(p, 0.5)
        opt = cls(params, lr=0.1, plan=plan, backend=backend)
        torch.set_default_device(default)
        try:
            for _ in range(3):
                opt.step()
            files.save_checkpoint(tmp_path / "run.pt", opt)
            files.load_checkpoint(tmp_path / "run.pt", opt)
            opt.step()
            dense = opt.dense_state_dict()["state"]
        finally:
            torch.set_default_device(None)
        found.append([*(p.detach() for p in params), *(t for entry in dense.values() for t in entry.values())])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("name", sampled("eager", optim.__all__))
def test_eager_steps_of_every_rule_whatever_the_default_dtype(name: str) -> None:
    """torch.where of two numbers, and a tensor of a number, take the default dtype where none is said."""
    found = []
    for default in (torch.float32, torch.float64, torch.bfloat16):
        params = [p.to(torch.bfloat16).detach().requires_grad_() for p in parameters((64, 72), (5, 6))]
        opt = getattr(optim, name)(list(zip("ab", params, strict=True)), plan="int8_split24", backend="reference")
        opt.feed(keep=True, **dict.fromkeys(opt.INPUTS, torch.ones_like))
        for p in params:
            p.grad = torch.full_like(p, 0.5)
        torch.set_default_dtype(default)
        try:
            for _ in range(2):
                opt.step()
                opt.load_state_dict(opt.state_dict())
        finally:
            torch.set_default_dtype(torch.float32)
        states = [opt.state[p] for p in params]
        found.append([*params, *(s[key] for s in states for key in s if isinstance(s[key], Tensor))])
    for other in found[1:]:
        assert all(a.dtype is b.dtype and torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
