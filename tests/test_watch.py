"""The flight recorder: its numbers against torch's on whole tensors, its sample, and that it changes nothing."""

import math
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from optgen.optim import SGD, AdamW, Lion
from optgen.runtime.modes import offload, watch
from optgen.runtime.work import counting

SHAPES = {"matrix": (96, 72), "odd": (7, 11, 3), "scalar": ()}


def made(plan: str, dtype: torch.dtype = torch.bfloat16, **options: Any) -> tuple[Any, dict[str, nn.Parameter]]:
    torch.manual_seed(1)
    params = {name: nn.Parameter(torch.randn(shape, dtype=dtype)) for name, shape in SHAPES.items()}
    return AdamW(params.items(), lr=1e-2, plan=plan, backend="reference", **options), params


def train(opt: Any, params: dict[str, nn.Parameter], steps: int) -> None:
    for _ in range(steps):
        for p in params.values():
            p.grad = torch.randn_like(p)
        opt.step()


def codes_of(kept: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a copy of the codes of each moment, one an entry."""
    found = {name: kept[f"{name}_codes"] for name in ("exp_avg", "exp_avg_sq") if f"{name}_codes" in kept}
    packed = "exp_avg_sq_row" in kept  # lpmm4: two codes a byte
    return {name: torch.stack([x & 15, x >> 4]) if packed else x.clone() for name, x in found.items()}


@pytest.mark.filterwarnings("ignore:.*discouraged")
@pytest.mark.parametrize("plan", ["fp32", "int8_split24", "int6_split24", "split32", "lpmm4"])
def test_numbers_are_those_of_whole_tensors(plan: str) -> None:
    """fp32 sums of n elements in runs of 256: relative errors below 256 * 2^-24, and the same of torch's own."""
    opt, params = made(plan)
    got: list[tuple[int, dict[str, Any]]] = []
    train(opt, params, 3)
    opt.watch(2, to=lambda *one: got.append(one), sample=math.inf)
    before = dict(zip(params, opt.full_weights(), strict=True))
    old = {n: codes_of(opt.state[p]) for n, p in params.items()}
    train(opt, params, 1)
    ((step, rows),) = got
    assert step == 4 and rows.keys() == params.keys()
    for (name, p), weight in zip(params.items(), opt.full_weights(), strict=True):
        row, g = rows[name], p.grad.float()
        update = weight - before[name]
        wanted = {
            "weight_norm": weight.norm(), "gradient_norm": g.norm(), "update_norm": update.norm(),
            "ratio": update.norm() / weight.norm(), "cosine": -(update * g).sum() / update.norm() / g.norm(),
        }  # fmt: skip
        for key, value in wanted.items():
            assert row[key] == pytest.approx(float(value), rel=1e-4, abs=1e-4 if key == "cosine" else 0), key
        assert row["elements"] == row["sampled"] == p.numel()
        for state, codes in codes_of(opt.state[p]).items() if plan in ("int8_split24", "lpmm4") else ():
            still = float((codes == old[name][state]).double().mean())
            assert row[f"{state}_still"] == pytest.approx(still, abs=1e-6), state


def test_sample_moves_on_and_is_scaled() -> None:
    """Weights of one size, not in order: the scaled norm is exact whatever is sampled, and turns reach every run."""
    opt, p = None, nn.Parameter(torch.full((64, 128), 0.5).t().contiguous().t())
    opt, got = Lion([p], lr=0.25, weight_decay=0, plan="fp32", backend="reference"), []
    opt.watch(1, to=lambda step, rows: got.append(rows["0"]), sample=512)
    for k in range(20):
        p.grad = torch.ones_like(p)
        if k:
            p.grad[39, 8] = math.nan  # element 5000, in one of 16 places of the second run
        opt.step()
        p.data.fill_(0.5)
    assert all(row["sampled"] == 512 and row["elements"] == 8192 for row in got)
    assert 0 < sum(math.isnan(row["gradient_norm"]) for row in got) < len(got)
    first = got[0]
    finite = [row for row in got if not math.isnan(row["weight_norm"])]
    assert finite and not any(row["weight_still"] for row in finite)
    assert [row["update_norm"] for row in finite] == pytest.approx([0.25 * math.sqrt(8192)] * len(finite), rel=2**-23)
    assert first["gradient_norm"] == pytest.approx(math.sqrt(8192)) or math.isnan(first["gradient_norm"])


def test_refusals() -> None:
    opt, _ = made("fp32")
    given = ({"to": "csv"}, "got 'csv'"), ({"to": None}, "with add_scalar"), ({"every": 0}, "every must")
    for options, text in (*given, ({"sample": 255}, "sample must"), ({"sample": math.nan}, "sample must")):
        with pytest.raises(ValueError, match=text):
            opt.watch(**{"to": print, **options})
    with opt.watch(to=print), pytest.raises(RuntimeError, match="watched already"):
        opt.watch(to=print)
    handle = opt.release_gradients()
    with pytest.raises(RuntimeError, match=r"released gradients are gone at step\(\)"):
        opt.watch(to=print)
    handle.remove()
    opt.watch(to=print)
    with pytest.raises(RuntimeError, match=r"watch\(\) measures in step\(\)"):
        opt.release_gradients()


def test_states_that_do_not_fit_are_left_to_the_step() -> None:
    params, got = {"p": nn.Parameter(torch.ones(8))}, []
    opt = SGD(params.items(), lr=0.1, momentum=0.0, plan="fp32", backend="reference")
    train(opt, params, 1)
    opt.watch(1, to=lambda step, rows: got.append(rows.keys()))
    for momentum in (0.9, 0.0):
        opt.param_groups[0]["momentum"] = momentum
        with pytest.raises(ValueError, match="has made steps without") if momentum else nullcontext():
            train(opt, params, 1)
    assert got == [{"p"}]


def test_a_writer_gets_scalars() -> None:
    calls: list[tuple[str, float, int]] = []
    opt, params = made("int8_split24")
    train(opt, params, 1)
    with opt.watch(1, to=SimpleNamespace(add_scalar=lambda *one: calls.append(one))):
        train(opt, params, 1)
    assert {tag.split("/")[1] for tag, _, _ in calls} == set(SHAPES) and {step for *_, step in calls} == {2}
    assert ("elements/matrix", 96 * 72, 2) in calls


def test_offloaded_steps_are_measured_and_captured_ones_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for on in (False, True):
        opt, params = made("int8_split24")
        if on:
            opt._offload = offload.Offload(resident=())
            opt.param_groups[0] |= {"offload": True, "backend": "cpp"}
        torch.manual_seed(3)
        train(opt, params, 1)
        opt.param_groups[0]["backend"] = "cpp"
        with opt.watch(1, to=lambda *one: found.append(one), sample=math.inf):
            train(opt, params, 2)
    assert found[:2] == found[2:] and len(found) == 4
    opt.watch(5, to=print)
    train(opt, params, 1)
    monkeypatch.setattr(counting, "capturing", lambda: True)
    with pytest.raises(RuntimeError, match=r"AdamW.watch: a CUDA graph is being captured.* call remove\(\)"):
        train(opt, params, 1)


def test_every_element_is_looked_at() -> None:
    for n in (*range(1025, 1600, 8), 2016, 2047, 3040, 4095, 5000, 8192):
        x = torch.arange(n)
        seen = torch.cat([watch.sampled(x, 1024, turn).flatten() for turn in range(n // 8)]).unique()
        assert set(range(n - 7)) <= set(seen.tolist())
