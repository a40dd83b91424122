"""Gradient release: the bits of ordinary steps, no gradient left, and nothing lost where something is refused."""

import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import optgen.optim as optim
from optgen.accumulate import accumulator
from optgen.runtime import Optimizer
from optgen.runtime.layout import sharding
from optgen.runtime.records.fp32_modules import keep_states_fp32
from tests.harness import same_bits
from tests.training import same


class Net(nn.Module):
    """A tied embedding, a matrix of more than 4096 elements, vectors, and a parameter that half of the batches use."""

    def __init__(self, vectors: bool = True) -> None:
        super().__init__()
        self.table = nn.Embedding(24, 64)
        self.inner = nn.Linear(64, 72, bias=vectors)
        self.outer = nn.Linear(72, 64, bias=False)
        self.rare = nn.Linear(64, 64, bias=False)

    def forward(self, tokens: Tensor, rare: bool = False) -> Tensor:
        h = self.table(tokens)
        h = h + self.outer(torch.tanh(self.inner(h)))
        if rare:
            h = h + self.rare(h)
        return h @ self.table.weight.T  # tied

    def loss(self, k: int) -> Tensor:
        tokens, wanted = torch.randint(24, (2, 4, 5), generator=torch.Generator().manual_seed(k))
        scores = self(tokens, rare=k % 2 == 1).float().flatten(0, 1)
        return nn.functional.cross_entropy(scores, wanted.flatten())


def net(dtype: torch.dtype = torch.bfloat16, vectors: bool = True) -> Net:
    torch.manual_seed(0)
    return Net(vectors).to(dtype)


def train(opt: Optimizer, model: Net, steps: int, *, every: int = 1, start: int = 0) -> None:
    """The loop that users have; the learning rate changes at each step."""
    schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
    for k in range(start, start + steps):
        for i in range(every):
            (model.loss(every * k + i) / every).backward()
        opt.step()
        schedule.step()
        opt.zero_grad()


def pair(
    make: Callable[[Net], Optimizer], dtype: torch.dtype = torch.bfloat16, vectors: bool = True
) -> tuple[Net, Optimizer, Net, Optimizer]:
    a, b = net(dtype, vectors), net(dtype, vectors)
    return a, make(a), b, make(b)


def released(
    dtype: torch.dtype = torch.bfloat16, cls: Any = optim.AdamW, options: Any = None, **release: Any
) -> tuple[Net, Any, Any]:
    """A model, its optimizer, and the handle of its released gradients."""
    model = net(dtype)
    opt = cls(model.named_parameters(), **(options or {}))
    return model, opt, opt.release_gradients(model, **release)


def test_gradients_are_gone_as_soon_as_they_are_used() -> None:
    model, opt, _ = released()
    alive: list[int] = []

    def count(_: Tensor) -> None:
        alive.append(sum(q.grad is not None for q in model.parameters()))

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(count)
    model.loss(1).backward()
    assert alive == [0] * 5  # hooks run in order: ours came first, and nothing waits
    assert all(p.grad is None for p in model.parameters())
    assert all(opt.state[p]["step"] == 1 for p in model.parameters())


@pytest.mark.parametrize("kept", [None, "fp32"])
def test_accumulation_is_exact_and_a_window_that_ends_early_is_updated_by_step(kept: str | None) -> None:
    a, opt_a, b, opt_b = pair(lambda m: optim.AdamW(m.named_parameters()), torch.float32)
    opt_b.release_gradients(b, accumulate=4, accumulator=None if kept is None else accumulator(kept))
    for opt, model in ((opt_a, a), (opt_b, b)):
        for k, size in enumerate((4, 2, 4)):
            for i in range(size):
                (model.loss(10 * k + i) / size).backward()
            opt.step()
            opt.zero_grad()
    same(a, b, opt_a, opt_b)
    assert all(p.grad is None for p in b.parameters())


def test_a_parameter_that_is_frozen_within_a_window_takes_what_came_and_no_more() -> None:
    model, opt, _ = released(torch.float32, accumulate=4, accumulator=accumulator("int8"))
    model.loss(0).backward()
    model.loss(2).backward()
    model.outer.weight.requires_grad_(False)
    opt.step()
    before = model.outer.weight.detach().clone()
    assert opt.state[model.outer.weight]["step"] == 1
    assert all(p.grad is None for p in model.parameters())
    model.loss(4).backward()
    opt.step()  # without zero_grad(), which released gradients do not need
    assert torch.equal(before, model.outer.weight)
    assert opt.state[model.outer.weight]["step"] == 1 and opt.state[model.inner.weight]["step"] == 2


def test_parameters_that_are_replaced_in_their_group() -> None:
    """As accelerate does for sharded models: other tensors stand in the groups afterwards."""
    model = net()
    opt = optim.AdamW(model.parameters())
    opt.release_gradients()
    fresh = nn.Parameter(model.inner.weight.detach().clone())
    model.inner.weight = fresh
    opt.param_groups[0]["params"][1] = fresh
    model.loss(0).backward()
    opt.step()
    assert opt.state[fresh]["step"] == 1
    model.loss(0).backward()
    assert fresh.grad is None
    assert opt.state[fresh]["step"] == 2


@pytest.mark.parametrize("kept", [None, "fp32"])
@pytest.mark.parametrize("change", ["freeze", "thaw", "rename", "group", "load"])
def test_windows_of_micro_batches_go_on_while_places_change(change: str, kept: str | None) -> None:
    """The first parameter leaves or comes in the middle of a window, or all have other names or states."""
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
    first, last = model[0].weight, model[2].weight
    opt = optim.AdamW(model[change == "thaw" :].named_parameters(), lr=0.1, plan="fp32", backend="reference")
    make = None if kept is None else accumulator(kept)
    opt.release_gradients(accumulate=4, accumulator=make)
    updates, before = [], last.detach().clone()
    for k in range(1, 9):
        group = opt.param_groups[0]
        if k == 3 and change == "freeze":
            group["params"].pop(0), group["param_names"].pop(0)
        elif k == 3 and change == "thaw":
            group["params"].insert(0, first), group["param_names"].insert(0, "first")
        elif k == 3 and change == "rename":
            group["param_names"][:] = [f"module.{name}" for name in group["param_names"]]
        elif k == 3 and change == "group":
            opt.add_param_group({"params": [("new", nn.Parameter(torch.zeros(3)))]})
        elif k == 3:
            opt.load_state_dict(opt.state_dict())
        model(torch.ones(2, 4)).square().mean().backward()
        if not torch.equal(before, last):
            updates.append(k)
            before = last.detach().clone()
    assert updates == [4, 8]


def test_remove_restores_ordinary_steps() -> None:
    model = net()
    opt = optim.AdamW(model.parameters())
    with opt.release_gradients(model, accumulate=2):
        model.loss(1).backward()
        held = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    assert [same_bits(p.grad, g) for p, g in zip(model.parameters(), held, strict=True)] == [True] * 5
    assert not opt.state
    opt.step()
    assert all(p.grad is not None and opt.state[p]["step"] == 1 for p in model.parameters())
    assert not opt._step_supports_amp_scaling
    opt.release_gradients(model).remove()


def test_parameters_outside_the_model_take_ordinary_steps() -> None:
    a, opt_a, b, opt_b = pair(lambda m: optim.AdamW(m.named_parameters(), lr=1e-2))
    opt_b.release_gradients(b.inner)
    for k in (1, 3, 5):
        for model, opt in ((a, opt_a), (b, opt_b)):
            model.loss(k).backward()
            assert [name for name, p in model.named_parameters() if p.grad is None] == [
                name for name in ("inner.weight", "inner.bias") if model is b
            ]
            opt.step()
            opt.zero_grad()
    same(a, b, opt_a, opt_b)


# -- clipping -----------------------------------------------------------------------------------------
def test_clipping_of_each_parameter_is_torchs() -> None:
    a, opt_a, b, opt_b = pair(lambda m: optim.AdamW(m.named_parameters(), lr=1e-2), torch.float32)
    opt_b.release_gradients(b, clip=0.02)
    clipped = 0
    for k in range(4):
        a.loss(k).backward()
        for p in a.parameters():
            clipped += p.grad is not None and float(nn.utils.clip_grad_norm_([p], 0.02)) > 0.02
        opt_a.step()
        opt_a.zero_grad()
        b.loss(k).backward()
        opt_b.step()
    assert clipped >= 4
    same(a, b, opt_a, opt_b)


def test_clipping_by_the_norm_of_the_step_before() -> None:
    a, opt_a, b, opt_b = pair(lambda m: optim.AdamW(m.named_parameters(), lr=1e-2), torch.float32)
    opt_b.release_gradients(b, clip=0.1, clip_by="previous_norm", accumulate=2)
    before = None
    for k in range(5):
        for i in range(2):
            a.loss(2 * k + i).backward()
            b.loss(2 * k + i).backward()
        norm = nn.utils.get_total_norm([p.grad for p in a.parameters() if p.grad is not None])
        for p in a.parameters():
            own = torch.linalg.vector_norm(p.grad)
            p.grad *= torch.clamp(0.1 / ((own if before is None else before) + 1e-6), max=1.0)
        before = norm
        assert norm > 0.1
        opt_a.step()
        opt_a.zero_grad()
        opt_b.step()
        opt_b.zero_grad()
    same(a, b, opt_a, opt_b)


def test_a_norm_that_is_not_finite_is_not_used() -> None:
    options = {"lr": 1e-2, "plan": "fp32"}
    model, _, handle = released(torch.float32, optim.SGD, options, clip=0.1, clip_by="previous_norm")
    handle._release.clipping.previous = torch.tensor(torch.inf)
    before = [p.detach().clone() for p in model.parameters()]
    model.loss(1).backward()
    for p, q in zip(model.parameters(), before, strict=True):
        # lr times the largest norm, and the rounding of the subtraction, half an ulp of each element
        assert 0 < (p - q).norm() <= 1e-2 * 0.1 * (1 + 2**-20) + (p.norm() + q.norm()) * 2**-24


# -- sums of micro-batches kept in a format -------------------------------------------------------------
def test_an_accumulator_keeps_no_gradient_between_micro_batches() -> None:
    """Sums are fp32 where a plan has no codes, and of modules that are marked to keep their states in fp32."""
    model = net()
    keep_states_fp32(model.outer)
    opt = optim.AdamW(model.named_parameters(), module=model)
    handle = opt.release_gradients(model, accumulate=2, accumulator=accumulator("int8"))
    model.loss(1).backward()
    assert all(p.grad is None for p in model.parameters())
    assert not opt.state
    for p, narrow in ((model.inner.weight, True), (model.inner.bias, False), (model.outer.weight, False)):
        kept = [v for v in handle._release._released[id(p)].sums.entry.values() if isinstance(v, Tensor)]
        assert (torch.float32 in {v.dtype for v in kept}) != narrow
    model.loss(1).backward()
    assert all(opt.state[p]["step"] == 1 for p in model.parameters())


@pytest.mark.parametrize(
    ("plan", "size", "error"), [("fp32", 4.0, 0.0), ("bf16_sr", 2.0, 2.0**-7), ("int8", 1.03125, 2.0**-6)]
)
def test_sums_take_the_bytes_and_have_the_errors_that_the_page_says(plan: str, size: float, error: float) -> None:
    """An ulp of a bf16 element is 2^-7 of it at most; an 8-bit one is off by 1/64 of its block's largest."""
    draw = torch.Generator().manual_seed(3)
    p = nn.Parameter(torch.zeros(64, 128))
    opt = optim.SGD([("p", p)], lr=1.0, plan="fp32")
    handle = opt.release_gradients(accumulate=2, accumulator=accumulator(plan))
    first, second = (torch.randn(64, 128, generator=draw) * 10 ** torch.linspace(-3, 3, 64)[:, None] for _ in range(2))
    (p * first).sum().backward()
    kept = handle._release._released[id(p)].sums.entry.values()
    assert sum(x.nbytes for x in kept if isinstance(x, Tensor)) == size * p.numel() and p.grad is None
    (p * second).sum().backward()
    largest = first.abs() if plan != "int8" else first.abs().unflatten(1, (-1, 64)).amax(2).repeat_interleave(64, 1)
    off, total = (-p.detach().double() - first.double() - second.double()).abs(), first.abs() + second.abs()
    assert (off <= error * largest + 2.0**-23 * total).all()
    assert (off > 0.5 * error * largest).any()


def test_zero_grad_forgets_a_sum_and_remove_gives_it_back() -> None:
    plain = net(torch.float32)
    model, opt, handle = released(torch.float32, accumulate=4, accumulator=accumulator("fp32"))
    model.loss(5).backward()
    opt.zero_grad()
    for k in (1, 3):
        model.loss(k).backward()
        plain.loss(k).backward()
    handle.remove()
    assert not opt.state
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


# -- what is refused ----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accumulate": 0}, "accumulate must be a whole number >= 1, got 0"),
        ({"accumulate": 2.5}, "accumulate must be a whole number >= 1, got 2.5"),
        ({"model": nn.Linear(2, 2)}, "no trainable parameter of this optimizer is in the model"),
        ({"model": [nn.Linear(2, 2)]}, "model must be a torch.nn.Module or None, got list"),
        ({"clip": -1.0}, "clip must be a number > 0, or None, got -1.0"),
        ({"clip": float("nan")}, "clip must be a number > 0, or None, got nan"),
        ({"clip": 1.0, "clip_by": "global_norm"}, "clip_by='previous_norm' takes that of the step before"),
        ({"clip": 1.0, "clip_by": "max"}, "clip_by must be one of norm, previous_norm, got 'max'"),
        ({"sums": "next"}, "sums must be 'previous' or None, got 'next'"),
        ({"accumulator": "int8", "accumulate": 2}, "accumulator must be what optgen.accumulate.accumulator"),
    ],
)
def test_wrong_options_change_nothing(options: dict[str, Any], message: str) -> None:
    model = net()
    opt = optim.AdamW(model.parameters())
    with pytest.raises((ValueError, TypeError), match=message):
        opt.release_gradients(**options)
    model.loss(1).backward()
    assert all(p.grad is not None for p in model.parameters())
    assert not opt.state


def test_an_error_within_backward_keeps_the_steps_before_it() -> None:
    """The gradient that met it is still there; parameters after it have none, and no step, until step() is called."""

    def made(model: Net) -> Optimizer:
        return optim.AdamW([{"params": [(name, p)], "lr": 1e-2} for name, p in model.named_parameters()])

    plain, plain_opt, model, opt = pair(made, vectors=False)
    opt.release_gradients(model)
    outer, inner, table = model.outer.weight, model.inner.weight, model.table.weight  # as backward comes to them
    before = [p.detach().clone() for p in (outer, inner, table)]
    (group,) = (g for g in opt.param_groups if g["params"][0] is inner)
    group["lr"] = -1.0
    with pytest.raises(ValueError, match="lr"):
        model.loss(0).backward()
    assert [torch.equal(p, w) for p, w in zip((outer, inner, table), before, strict=True)] == [False, True, True]
    assert [p in opt.state for p in (outer, inner, table)] == [True, False, False]
    assert [p.grad is None for p in (outer, inner, table)] == [True, False, True]
    group["lr"] = 1e-2
    opt.step()
    plain.loss(0).backward()
    plain.table.weight.grad = None
    plain_opt.step()
    same(plain, model, plain_opt, opt)


def test_a_second_optimizer_is_refused_while_the_first_is_there() -> None:
    """It would never see a gradient: the hook of the first one comes first, and frees it."""
    model = net()
    a, b = (optim.AdamW(model.parameters()) for _ in range(2))
    handle = a.release_gradients(model)
    with pytest.raises(RuntimeError, match=r"remove\(\) the handle of that call first"):
        a.release_gradients(model)
    with pytest.raises(RuntimeError, match=r"released to another optimizer already \(AdamW\).*remove\(\) the handle"):
        b.release_gradients(model)
    model.loss(0).backward()
    assert a.state and not b.state
    handle.remove()
    b.release_gradients(model)
    c = optim.AdamW([nn.Parameter(torch.ones(3))])
    c.release_gradients()
    with pytest.raises(RuntimeError, match="released to another optimizer"):
        c.add_param_group({"params": [model.inner.weight]})
    assert len(c.param_groups) == 1


def test_an_optimizer_that_is_deleted_updates_nothing_any_more() -> None:
    """Its handle keeps it; a parameter does not."""
    model, opt, handle = released()
    there = weakref.ref(opt)
    del opt
    assert handle.optimizer is there()
    del handle
    gc.collect()
    assert there() is None
    model.loss(0).backward()
    assert model.inner.weight.grad is not None
    optim.AdamW(model.parameters()).release_gradients(model)


def test_evaluation_refuses_backward() -> None:
    model, opt, _ = released(cls=optim.ScheduleFreeAdamW)
    model.loss(1).backward()
    opt.eval()
    with pytest.raises(RuntimeError, match=r"in evaluation: call train\(\) first"):
        model.loss(1).backward()
    opt.train()


def test_a_grad_scaler_is_refused_by_name() -> None:
    model, opt, handle = released(torch.float32)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model.loss(1)).backward()
    with pytest.raises(RuntimeError, match=r"GradScaler.*bf16.*remove\(\)"):
        scaler.step(opt)
    handle.remove()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model.loss(1)).backward()
    scaler.step(opt)
    assert opt.state[model.inner.weight]["step"] == 2


@pytest.mark.usefixtures("one_rank")
def test_wrappers_that_reduce_later_are_refused() -> None:
    model = net(torch.float32)
    opt = optim.AdamW(model.parameters())
    wrapped = nn.parallel.DistributedDataParallel(model)
    with pytest.raises(NotImplementedError, match=r"DistributedDataParallel sums gradients.*fully_shard"):
        opt.release_gradients(wrapped)
    del wrapped
    other, opt, _ = released(torch.float32)
    wrapped = nn.parallel.DistributedDataParallel(other, find_unused_parameters=True)
    tokens = torch.zeros(1, 3, dtype=torch.int64)
    with pytest.raises(NotImplementedError, match="DistributedDataParallel"):
        wrapped(tokens).sum().backward()
    assert not opt.state


@pytest.mark.usefixtures("one_rank")
def test_the_norm_over_parameters_of_which_some_are_dtensors() -> None:
    from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

    mesh = init_device_mesh("cpu", (1,))
    found = []
    for sharded in (False, True):
        draw = torch.Generator().manual_seed(3)
        values = [torch.randn(5, 8, generator=draw) for _ in range(2)]
        first = DTensor.from_local(values[0], mesh, [Replicate()]) if sharded else values[0]
        params = [nn.Parameter(first), nn.Parameter(values[1])]
        opt = optim.SGD(params, lr=0.1, plan="fp32")
        handle = opt.release_gradients(clip=0.1, clip_by="previous_norm")
        for _ in range(3):
            for p in params:
                p.square().sum().backward()
            opt.step()
        norm = handle._release.clipping.previous
        assert type(norm) is Tensor
        found.append([norm, *(sharding.local(p.detach()) for p in params)])
    assert all(map(torch.equal, *found))


# -- outcomes that would be wrong without a word
@pytest.mark.parametrize(("every", "accumulate"), [(1, 1), (2, 2), (9, 1), (2, 1)])
def test_several_backwards_before_a_step_warn_once(every: int, accumulate: int) -> None:
    """But not where gradients are accumulated, nor where step() is never called."""
    model, opt, _ = released(options={"plan": "fp32_master"}, accumulate=accumulate)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for k in range(6):
            model.loss(k).backward()
            if k % every == every - 1:
                opt.step()
    assert len(caught) == (every == 2 and accumulate == 1)
    for one in caught:
        assert one.filename == __file__
        assert "'table.weight' (bfloat16 [24, 64]) was updated 2 times since the last step()" in str(one.message)
        assert "give accumulate=2" in str(one.message)
