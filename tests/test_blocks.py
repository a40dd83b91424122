"""Blocks of rows: Adam-mini's second moment of an attention head, and what the option `blocks` takes and refuses."""

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import optgen
from optgen.driver import checkpoints
from optgen.driver.compile import compile as compiled
from optgen.lang import flag, hyper, optimizer, row_mean, sqrt, state
from optgen.lang.spec import Spec
from optgen.optim import AdamMini, Muon
from optgen.runtime import Optimizer
from optgen.runtime.layout import sharded_states, sharding
from tests.harness import same_bits, spec_of
from tests.training import bits, params_of, states

HEADS, KV_HEADS, DIM = 8, 2, 40


class Attention(nn.Module):
    """Fewer heads of keys than of queries."""

    def __init__(self) -> None:
        super().__init__()
        size = DIM // HEADS
        self.q_proj = nn.Linear(DIM, HEADS * size, bias=False)
        self.k_proj = nn.Linear(DIM, KV_HEADS * size, bias=False)
        self.v_proj = nn.Linear(DIM, KV_HEADS * size, bias=False)
        self.o_proj = nn.Linear(HEADS * size, DIM, bias=False)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(11, DIM)
        self.attn = Attention()
        self.mlp = nn.Linear(DIM, 3 * DIM, bias=False)
        self.mixing = nn.Linear(DIM, 6, bias=False)
        self.norm = nn.RMSNorm(DIM)
        self.lm_head = nn.Linear(DIM, 11, bias=False)


def net() -> Net:
    torch.manual_seed(0)
    return Net()


BLOCKS = {"*.q_proj.weight": HEADS, "*.k_proj.weight": KV_HEADS, "mixing": 1}


def gradients(model: nn.Module, steps: int, seed: int = 1) -> list[dict[str, Tensor]]:
    """fp32, of sizes that vary from step to step, from row to row and from element to element."""
    draw = torch.Generator().manual_seed(seed)

    def one(p: Tensor, size: float) -> Tensor:
        rows = torch.randn(p.shape[:1], generator=draw).exp().view(-1, *[1] * (p.ndim - 1))
        return torch.randn(p.shape, generator=draw) * torch.randn(p.shape, generator=draw).exp() * rows * size

    sizes = [2.0 ** float(torch.randn((), generator=draw)) for _ in range(steps)]
    return [{name: one(p, size) for name, p in model.named_parameters()} for size in sizes]


def train(opt: Optimizer, model: nn.Module, grads: list[dict[str, Tensor]]) -> None:
    for found in grads:
        for name, p in model.named_parameters():
            p.grad = found[name].to(p.dtype)
        opt.step()


def same(a: Optimizer, b: Optimizer) -> None:
    """The weights of two optimizers, and all that they keep."""
    assert bits(params_of(a)) == bits(params_of(b))
    assert states(a) == states(b)


# -- what blocks are ------------------------------------------------------------------------------------------------
SHAPES = [((96, 80), 8), ((96, 83), 8), ((96, 83), 1), ((24, 5, 7, 9), 4), ((12, 7), 3), ((12, 7), 12)]


@optimizer(cite="nobody", matrix="blocks", name="AtTimes")
def at_times(
    p, g, m=state(), *, lr=hyper(1e-3, ge=0), beta=hyper(0.9, ge=0, lt=1), k=hyper(2, ge=1), now=flag(every="k")
):  # fmt: skip
    """Looks at rows in every k-th step only."""
    m = beta * m + (1 - beta) * g
    p = p - lr * m / ((sqrt(row_mean(g * g)) if now else 1) + 1e-8)
    return p, m


@pytest.mark.parametrize(
    ("spec", "plan", "backend"),
    [
        *((spec_of("adam_mini"), plan, "reference") for plan in ("fp32", "int8_split24", "lpmm4")),
        *((spec_of("adam_mini"), "int8_split24", backend) for backend in ("cpp", "triton")),
        (at_times, "int8_split24", "reference"),
    ],
    ids=lambda x: getattr(x, "name", x),
)  # fmt: skip
def test_blocks_of_rows_are_rows_of_another_shape(spec: Spec, plan: str, backend: str) -> None:
    """(rows, columns) in n blocks takes the steps of (n, all of a block), bit for bit: codes, scales, random bits."""
    draw = torch.Generator().manual_seed(3)
    params, views, whole, blocks = {}, {}, {}, {}
    for k, (shape, count) in enumerate([((4, 83), 2), SHAPES[4]] if backend == "triton" else SHAPES):
        value = torch.randn(shape, generator=draw).bfloat16()
        params[f"w{k}"], blocks[f"w{k}"] = nn.Parameter(value), count
        views[f"w{k}"] = nn.Parameter(value.clone().view(count, -1))
        whole[f"w{k}"] = nn.Parameter(value.clone())
    rule, options = compiled(spec, plan=plan), {"lr": 1e-2, "plan": plan, "backend": backend}
    ours, theirs = rule(params.items(), blocks=blocks, **options), rule(views.items(), **options)
    plain = rule(whole.items(), **options)
    for _ in range(2):
        for p, q, r in zip(params.values(), views.values(), whole.values(), strict=True):
            p.grad = torch.randn(p.shape, generator=draw).bfloat16()
            q.grad, r.grad = p.grad.view(q.shape), p.grad
        for opt in (ours, theirs, plain):
            opt.step()
    for p, q in zip(params.values(), views.values(), strict=True):
        assert same_bits(p.detach().view(q.shape), q.detach())
        for key, value in theirs.state[q].items():
            mine = ours.state[p][key]
            assert same_bits(mine.view(value.shape), value) if isinstance(value, Tensor) else mine == value, key
    assert ours.memory().states == theirs.memory().states
    assert not same_bits(params["w0"].detach(), whole["w0"].detach())  # without blocks, of its own rows


# -- how they are said, and kept --------------------------------------------------------------------------------------
def test_groups_may_have_blocks_of_their_own() -> None:
    model = net()
    named = list(model.named_parameters())
    groups = [{"params": named[:1]}, {"params": named[1:3], "blocks": {"*.q_proj.weight": HEADS}}]
    opt = AdamMini(groups, blocks={"*.k_proj.weight": 2})
    kept = (("attn.q_proj.weight", HEADS), ("attn.k_proj.weight", 2))
    assert [group.get("blocks") for group in opt.param_groups] == [None, kept]
    opt.add_param_group({"params": named[3:], "blocks": {"mixing": 1}})
    assert opt.param_groups[2]["blocks"] == (("mixing.weight", 1),)
    train(opt, model, gradients(model, 1))
    rows = [opt.state[p]["vmean_row"].shape[0] for _, p in named if p.ndim > 1]
    assert rows == [11, HEADS, 2, 10, 40, 120, 1, 11]


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "not equal": ({"*.q_proj.weight": 7}, ValueError, "parameter 'attn.q_proj.weight' of shape [40, 40] has 40 rows, "
                                                      "which do not fall into 7 equal blocks"),
    "a vector": ({"norm": 4}, ValueError, "'norm.weight' of shape [40] has no rows, and is one block as it is"),
    "no match": ({"*.g_proj.weight": 4}, ValueError, "blocks: '*.g_proj.weight' matches no parameter"),
    "zero": ({"*.q_proj.weight": 0}, ValueError, "blocks['*.q_proj.weight']: expected 1 block or more, got 0"),
    "half": ({"*.q_proj.weight": 1.5}, TypeError, "blocks['*.q_proj.weight']: expected a number of blocks, got 1.5"),
    "a switch": ({"*.q_proj.weight": True}, TypeError, "expected a number of blocks, got True"),
    "a number": (8, TypeError, "blocks must be a dict such as {'*.q_proj.weight': 32}, or None, got 8"),
}  # fmt: skip


def test_a_vector_by_its_own_name_is_no_blocks() -> None:
    """A pattern may hold for biases, too."""
    named = [("a.weight", nn.Parameter(torch.zeros(8, 6))), ("a.bias", nn.Parameter(torch.zeros(8)))]
    assert Muon(named, blocks={"a.*": 4}).param_groups[0]["blocks"] == (("a.weight", 4),)
    with pytest.raises(ValueError, match=r"'a.bias' of shape \[8\] has no rows"):
        Muon(named, blocks={"a.bias": 4})


@pytest.mark.parametrize("what", REFUSED)
def test_bad_blocks_are_refused(what: str) -> None:
    blocks, error, text = REFUSED[what]
    model = net()
    with pytest.raises(error) as found:
        AdamMini(model.named_parameters(), blocks=blocks)
    assert text in str(found.value)
    opt = AdamMini([("embed", model.embed_tokens.weight)])
    before = copy.deepcopy(opt.state_dict())
    rest = [(name, p) for name, p in model.named_parameters() if p is not model.embed_tokens.weight]
    with pytest.raises(error):
        opt.add_param_group({"params": rest, "blocks": blocks})
    assert opt.state_dict() == before


def test_a_group_that_was_given_rules_later_is_refused_before_anything_changes() -> None:
    model = net()
    opt = AdamMini(model.named_parameters(), blocks=BLOCKS)
    grads, start = gradients(model, 1), copy.deepcopy(model.state_dict())
    for wrong, error in (({"*": 1}, TypeError), ((("attn.q_proj.weight", 7),), ValueError)):
        opt.param_groups[0]["blocks"] = wrong
        with pytest.raises(error, match="blocks"):
            train(opt, model, grads)
        assert not opt.state and all(same_bits(p, start[name]) for name, p in model.state_dict().items())


def test_checkpoints_of_other_blocks_and_plans(tmp_path: Path) -> None:
    """Dense states fit the blocks that made them; `optgen convert` keeps both."""
    model = net().bfloat16()
    grads = gradients(model, 3)
    opt = AdamMini(model.named_parameters(), lr=1e-2, blocks=BLOCKS)
    train(opt, model, grads[:2])
    dense = opt.dense_state_dict()
    assert dense["state"][1]["vmean_row"].shape == (HEADS, 1)
    plain = AdamMini(net().bfloat16().named_parameters(), plan="fp32", blocks=BLOCKS)
    plain.load_state_dict(dense)
    rows = AdamMini(net().bfloat16().named_parameters(), plan="fp32")
    with pytest.raises(ValueError, match=r"vmean_row: expected float32 \[40, 1\], got float32 \[8, 1\]"):
        rows.load_state_dict(dense)
    assert not rows.state
    optgen.save_checkpoint(tmp_path / "run.pt", opt, model)
    assert not checkpoints.verify(str(tmp_path / "run.pt"))["findings"]
    checkpoints.convert(str(tmp_path / "run.pt"), str(tmp_path / "fp32.pt"), to="fp32")
    other = net().bfloat16()
    again = AdamMini(other.named_parameters(), plan="fp32", blocks=BLOCKS)
    optgen.load_checkpoint(tmp_path / "fp32.pt", again, other)
    for a, b in zip(opt._entries(), again._entries(), strict=True):
        for name in ("m", "vmean_row", "vmean"):
            if name in opt.state[a.p]:
                assert same_bits(dense["state"][a.position][name], again.state[b.p][name]), (a.name, name)


# -- parts of several ranks (whole runs: tests/ranks.py) ------------------------------------------------------------
def check(shape: tuple[int, ...], ranks: int, dim: int, height: int) -> None:
    sharded_states._check_blocks(torch.Size(shape), (ranks,), ((dim, 1),), height)


def test_parts_hold_whole_blocks_or_are_refused() -> None:
    """And where they do, states with one row for each block are cut at the same blocks."""
    height = 6
    for heads, ranks in itertools.product(range(1, 13), range(1, 9)):
        rows = heads * height
        cuts = [sharding.chunk(rows, ranks, k) for k in range(ranks)]
        if any(x % height for cut in cuts for x in cut):
            with pytest.raises(ValueError, match=f"cuts a block of 6 rows: .* multiple of the {ranks} ranks"):
                check((rows, 5), ranks, 0, height)
            continue
        check((rows, 5), ranks, 0, height)
        assert [tuple(x * height for x in sharding.chunk(heads, ranks, k)) for k in range(ranks)] == cuts


def test_cuts_along_columns_are_refused() -> None:
    with pytest.raises(ValueError, match="cut along another dimension than the first"):
        check((16, 8), 2, 1, 4)
