"""States in host memory.  Without an accelerator the machinery is given another reading of "device": tensors on the CPU
that must be copied before they are worked on; what moves, waits and steps is what moves, waits and steps on a GPU."""

import copy
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import optgen.optim as optim
from optgen.runtime import Optimizer
from optgen.runtime.modes import mover, offload
from tests.harness import same_bits
from tests.test_release import net, pair, train
from tests.training import same


class Watched(mover.Mover):
    """Copies that say when each piece of work began and ended."""

    def __init__(self, events: list[str]) -> None:
        super().__init__(torch.device("cpu"))
        self.events = events

    def fetch(self, pairs: Sequence[mover.Pair]) -> None:
        self.events.append(f"fetch {len(pairs)}")
        super().fetch(pairs)

    def send(self, pairs: Sequence[mover.Pair]) -> None:
        super().send(pairs)
        self.events.append(f"send {len(pairs)}")


def moved(opt: Optimizer, events: list[str] | None = None) -> Optimizer:
    """An optimizer for which the CPU is a device to be moved from."""
    log = [] if events is None else events
    opt._offload = offload.Offload(lambda _: Watched(log), resident=())
    for group in opt.param_groups:
        group["offload"] = True
    return opt


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks for the parameters of a small model."""
    monkeypatch.setattr(offload, "CHUNK", 20_000)


def test_copies_go_on_while_the_host_computes() -> None:
    """The next chunk is fetched before the one before it is sent back, and never more than two are on their way."""
    model = net(torch.float32)
    events: list[str] = []
    opt = moved(optim.AdamW(model.named_parameters(), backend="reference"), events)
    model.loss(1).backward()
    opt.step()
    open_chunks, most = 0, 0
    for e in events:
        open_chunks += 1 if e.startswith("fetch") else -1
        most = max(most, open_chunks)
    assert open_chunks == 0
    assert most == 2
    assert [len(mover.buffers) for mover in opt._offload._movers.values()] == [2]


def test_options_are_refused_before_anything_changes() -> None:
    model = net()
    opt = moved(optim.AdamW(model.named_parameters(), lr=1e-2))
    before = [p.detach().clone() for p in model.parameters()]
    model.loss(1).backward()
    for key, value, message in (("lr", -1.0, "lr"), ("backend", "triton", "offload=True updates on the host")):
        old, opt.param_groups[0][key] = opt.param_groups[0][key], value
        with pytest.raises(ValueError, match=message):
            opt.step()
        opt.param_groups[0][key] = old
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert not opt.state
    opt.step()
    with pytest.raises(TypeError, match="offload"):
        optim.AdamW([{"params": [nn.Parameter(torch.ones(2))], "offload": "yes"}])


def test_chunks_before_an_error_stay_finished() -> None:
    class Broken(mover.Mover):
        sent = 0

        def send(self, pairs: Sequence[mover.Pair]) -> None:
            self.sent += 1
            if self.sent > 1:
                raise OSError("the link is down")
            super().send(pairs)

    a, opt_a, b, opt_b = pair(lambda m: optim.AdamW(m.named_parameters(), lr=1e-2))
    before, link = copy.deepcopy(b), Broken(torch.device("cpu"))
    moved(opt_b)._offload = offload.Offload(lambda _: link, resident=())
    for model in (a, b):
        model.loss(1).backward()
    opt_a.step()
    with pytest.raises(OSError, match="the link is down"):
        opt_b.step()
    assert all(isinstance(p.grad, Tensor) for p in b.parameters())
    stepped = [torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True)]
    waiting = [torch.equal(p, q) for p, q in zip(before.parameters(), b.parameters(), strict=True)]
    assert any(stepped) and any(waiting) and [not x for x in stepped] == waiting


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["AdamW", "LAMB"])
def test_on_a_gpu_the_bits_are_those_of_the_host(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "CHUNK", 20_000)
    a, b = net(), net().cuda()
    opt_a = getattr(optim, name)(a.named_parameters(), backend="cpp")
    opt_b = getattr(optim, name)([{"params": list(b.named_parameters()), "offload": True}])
    for k in range(4):
        a.loss(k).backward()
        for p, q in zip(a.parameters(), b.parameters(), strict=True):
            q.grad = None if p.grad is None else p.grad.cuda()
        for opt in (opt_a, opt_b):
            opt.step()
            opt.zero_grad()
    b.cpu()
    assert all(same_bits(p.detach(), q.detach()) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert all(v.device.type == "cpu" for kept in opt_b.state.values() for v in kept.values() if isinstance(v, Tensor))


@pytest.mark.cuda
def test_memory_of_a_gpu_falls_by_what_the_optimizer_says() -> None:
    """Bits come back, in pinned memory meanwhile; a graph that captured a step has to go first."""
    a, b = (nn.Sequential(*(nn.Linear(1024, 1000 + k) for k in range(4))).bfloat16().cuda() for _ in range(2))
    b.load_state_dict(a.state_dict())
    one, two = (optim.AdamW(m.named_parameters(), capturable=True) for m in (a, b))

    def step(model: nn.Module, opt: Optimizer, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=draw).to(p)
        opt.step()

    for k in range(6):
        step(a, one, k)
        step(b, two, k)
        if k == 3:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                one.step()
            graph.reset()
            with pytest.raises(RuntimeError, match=r"offload_states\(recapture=True\)"):
                one.offload_states()
        a.zero_grad()
        torch.cuda.synchronize()
        before, states = torch.cuda.memory_allocated(), sum(one.memory().states.values())
        one.offload_states(recapture=k == 3)
        assert states <= before - torch.cuda.memory_allocated() <= states + 2**20
        assert one.memory().places == {"cuda:0": one.memory().weights, "cpu": states}
        kept = [x for p in a.parameters() for key, x in one.state[p].items() if key != "step"]
        assert all(x.is_pinned() for x in kept)
        one.dense_state_dict()
        one.reload_states()
        assert one.memory().places == {"cuda:0": one.memory().total}
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        assert same_bits(p.detach(), q.detach())
        assert all(torch.equal(x, two.state[q][key]) for key, x in one.state[p].items())


def test_what_lies_where_a_graph_may_have_its_address_stays_there(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, one = torch.device("cuda", 0), offload.Offload()
    there = SimpleNamespace(tensor=SimpleNamespace(device=gpu), home=gpu)
    monkeypatch.setattr(offload, "places", lambda *_: [there])
    one.bring(None)  # no owner: the places are given
    assert not one._movers and not one.arriving


@pytest.mark.usefixtures("one_rank")
def test_parts_of_tensors_are_refused_by_name() -> None:
    from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

    mesh = init_device_mesh("cpu", (1,))
    p = nn.Parameter(DTensor.from_local(torch.ones(2, 64), mesh, [Replicate()]))
    opt = moved(optim.AdamW([("up", p)], plan="fp32"))
    p.grad = torch.ones_like(p)
    with pytest.raises(NotImplementedError, match=r"parameter 'up' \(float32 \[2, 64\]\) is a DTensor on cpu"):
        opt.step()
    assert not opt.state
    opt.param_groups[0]["offload"] = False
    opt.step()


def test_released_parameters_take_turns_in_two_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one for each: that would be pinned memory of the size of the model."""
    taken: list[Tensor] = []

    def buffer(self: mover.Mover) -> Tensor:
        taken.append(mover.Mover.buffer(self))
        return taken[-1]

    monkeypatch.setattr(Watched, "buffer", buffer)
    a, opt_a, b, opt_b = pair(lambda m: optim.AdamW(m.named_parameters(), backend="cpp"))
    moved(opt_b).release_gradients(b)
    train(opt_a, a, 3)
    train(opt_b, b, 3)
    same(a, b, opt_a, opt_b)
    assert all(p.grad is None for p in b.parameters())
    largest = max(p.numel() * 2 for p in b.parameters())
    assert len({x.data_ptr() for x in taken}) == 2 and {x.numel() for x in taken} == {2 * largest}
