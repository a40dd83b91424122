"""The GPU check without a GPU: its own arithmetic, and dry runs in Triton's interpreter of right and wrong kernels."""

from __future__ import annotations

import ast
import importlib
import json
import math
import os
import pickle
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import gpu_check  # noqa: E402
from gpu import (  # noqa: E402
    bench,
    catalog,
    compare,
    contenders,
    correct,
    jobs,
    machine,
    moves,
    report,
    shapes,
    stages,
    workers,
)

from optgen.runtime import eager, launch, sums  # noqa: E402

BF16, FP32 = torch.bfloat16, torch.float32


# What there is to check -----------------------------------------------------------------------------------------------


def test_cases_hold_every_kernel_once() -> None:
    found = catalog.cases()
    assert len(set(found)) == len(found) and len({str(c) for c in found}) == len(found)
    listed = {v for name in catalog.names() for plan in catalog.generated_class(name).PLANS
              for v in catalog.plan_module(catalog.generated_class(name), plan).VARIANTS}  # fmt: skip
    run = [v for case in found for v in catalog.variants(case)]
    single = {v for v in listed if not v.stages}
    assert len(run) == len(set(run)) and set(run) <= single
    # What has other variants of several stages is checked with those.
    left = {v.function for v in single - set(run)}
    assert all(any(name.startswith(spec) for spec, _, _ in stages.settings()) for name in left)
    assert found[0].spec == "adamw" and found[0].usual


def test_options_bring_about_the_flags() -> None:
    for case in catalog.cases():
        cls = catalog.generated_class(case.cls)
        p = torch.nn.Parameter(torch.zeros(5000, dtype=case.dtype))
        side = correct.Side(case, [correct.Shape((5000,))], [torch.zeros(5000)], "reference", torch.device("cpu"))
        assert side.select(p)[1] in catalog.variants(case), case
        assert isinstance(side.optimizer, cls)


def test_every_kernel_has_a_rule_to_be_held_to() -> None:
    """Also those whose flags follow a tensor's shape, as Muon's, or the step, as Lookahead's; both are stepped."""
    for case in catalog.cases():
        for variant in catalog.variants(case):
            assert compare.Rule.of(catalog.generated_class(case.cls), tuple(variant.flags.items())), variant.function
    case = next(iter(catalog.cases(["lookahead_adamw.fp32.float32"])))
    side = correct.Side(case, correct.TINY[:1], [torch.zeros(4353)], "reference", torch.device("cpu"))
    found = {side.stepped(0, step)[1] for step in range(1, correct.STEPS + 1)}
    assert found == {v for v in catalog.variants(case) if not v.small}


def test_rules_of_several_sweeps_are_compared_bit_by_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device, but in Triton's interpreter; and a reference that does otherwise is found out."""
    wanted = stages.settings()
    several = {s for s, plan, _ in wanted if plan == "fp32"}
    assert several >= {"came", "lamb", "adafactor", "prodigy", "muon"}
    assert not several & {"adamw", "lion", "lookahead_adamw"}
    assert {plan for s, plan, _ in wanted if s == "adamw"} >= {"int4_split24", "int5_split24", "int6_split24", "lpmm4"}
    shapes = ((6, 70), (), (5,), (0,), (2, 3, 4))
    found = stages.check_one("lamb", "int8_split24", "bfloat16", torch.device("cpu"), shapes)
    assert not found.problems
    assert found.elements == stages.STEPS * (420 + 1 + 5 + 24)
    monkeypatch.setattr(eager.Blocks, "tensor_sum", lambda self, x: sums.tensor(2 * x.reshape(-1)))
    assert stages.check_one("lamb", "fp32", "float32", torch.device("cpu"), shapes).problems


def test_patterns_choose_cases() -> None:
    assert {c.spec for c in catalog.cases(["lion"])} == {"lion"}
    assert [str(c) for c in catalog.cases(["adamw.fp32.float32"], quick=True)] == ["adamw.fp32.float32"]
    assert not catalog.cases(["ada"])  # whole words only
    assert all(c.usual and c.param != "float16" for c in catalog.cases(quick=True))


@pytest.mark.parametrize("name", ["AdamW", "Lion", "SGD"])
def test_traffic_is_what_the_kernel_s_header_says(name: str) -> None:
    cls = catalog.generated_class(name)
    for plan in cls.PLANS:
        module = catalog.plan_module(cls, plan)
        text = (Path(module.__file__ or "").parent / "triton_kernels.py").read_text(encoding="utf-8")
        said = re.search(r"traffic\s+([\d.]+) B per bfloat16 parameter", text)
        first = next(v for v in module.VARIANTS if v.param == "bfloat16" and not v.small)
        if first.stages:  # counted in tests/test_rows_and_columns.py
            continue
        assert said and catalog.traffic(module, first.kernel_name, BF16).total == float(said[1]), plan


def test_traffic_refuses_a_kernel_that_it_cannot_read() -> None:
    with pytest.raises(ValueError, match="cannot read what the pointers of nothing point to"):
        catalog.traffic(catalog.plan_module(catalog.generated_class("AdamW"), "fp32"), "nothing", BF16)


def test_models_have_the_shapes_of_the_real_ones() -> None:
    # Counts as published: 124M (Radford et al. 2019, tied embeddings), 8.03B (Grattafiori et al. 2024).
    assert (len(shapes.gpt2()), shapes.total(shapes.gpt2())) == (148, 124_439_808)
    assert (len(shapes.llama_8b()), shapes.total(shapes.llama_8b())) == (291, 8_030_261_248)


def test_huge_takes_a_plan_without_random_numbers() -> None:
    case = correct.huge_case()
    assert case is not None and not any(v.stochastic for v in catalog.variants(case))
    assert max(v.block for v in catalog.variants(case)) > 1


# Bounds ---------------------------------------------------------------------------------------------------------------


def adamw(plan: str = "fp32", param: str = "float32") -> catalog.Case:
    return next(c for c in catalog.cases([f"adamw.{plan}.{param}"]) if c.usual)


def one_step(case: catalog.Case, size: tuple[int, ...], dtype: torch.dtype) -> tuple[correct.Side, Any]:
    """(a reference after its first step, what fast maths is allowed in that step)."""
    generator = torch.Generator().manual_seed(5)
    shape = correct.Shape(size)
    weights = [torch.randn(shape.numel, generator=generator)]
    side = correct.Side(case, [shape], weights, "reference", torch.device("cpu"))
    side.start()
    rule = compare.Rule.of(catalog.generated_class(case.cls), case.flags)
    assert rule is not None
    g = [torch.randn(size, generator=generator).to(dtype)]
    before = side.all_stored()
    module, variant = side.select(side.params[0])
    allowed = correct.allowed_of(module, variant, before, g, [0], rule, side)
    side.step(g)
    return side, allowed[0]


def test_allowance_holds_reordered_maths_and_nothing_coarser() -> None:
    side, allowed = one_step(adamw(), (4500,), FP32)
    p = side.stored(0).p.double()
    update = 0.0437  # lr: what Adam's first step moves every weight by
    # 16 operations of 8 half-ulps each, of the update; a few of the weight.
    assert (allowed["p"] > 16 * 2.0**-24 * update).all()
    assert (allowed["p"] < 2.0**-14 * (update + p.abs())).all()
    assert (allowed["exp_avg_sq"] > 0).all()


def verdict_of(case: catalog.Case, dtype: torch.dtype, wrong: Any = None) -> compare.Verdict:
    """The reference compared with itself, after `wrong` has changed what one of the two stored."""
    side, allowed = one_step(case, (70, 70), dtype)
    module, variant = side.select(side.params[0])
    kernel = side.stored(0)
    if wrong:
        wrong(kernel)
    verdict = compare.Verdict()
    verdict.compare(module, variant, kernel, side.stored(0), allowed, "here")
    verdict.finish()
    return verdict


def test_equal_results_pass() -> None:
    settings = (("fp32", "float32", FP32), ("int8_split24", "bfloat16", BF16), ("bf16", "float16", BF16))
    for plan, param, dtype in settings:
        verdict = verdict_of(adamw(plan, param), dtype)
        assert not verdict.problems and verdict.elements == 4900
        assert set(verdict.worst.values()) == {0.0}


def test_an_update_that_is_a_thousandth_off_fails() -> None:
    def wrong(kernel: compare.Stored) -> None:
        kernel.p.add_(1e-3 * 0.0437)

    (problem,) = verdict_of(adamw(), FP32, wrong).problems
    assert problem.startswith("p of here: element")


def test_codes_one_off_fail_where_they_are_too_many_to_be_chance() -> None:
    def some(count: int) -> Any:
        def wrong(kernel: compare.Stored) -> None:
            kernel.fields["exp_avg_codes"].view(-1)[:count] ^= 1

        return wrong

    case = adamw("int8_split24", "bfloat16")
    assert not verdict_of(case, BF16, some(3)).problems
    (problem,) = verdict_of(case, BF16, some(2500)).problems
    assert problem.startswith("exp_avg_codes: 2500 of 4900 codes differ")


@pytest.mark.parametrize("plan", ["bnb8", "torchao8", "torchao_fp8"])
def test_scales_of_fp32_may_differ_in_their_last_places_alone(plan: str) -> None:
    """Nothing rounds them: fast maths gives nearly every block another one."""

    def moved(by: int) -> Any:
        def wrong(kernel: compare.Stored) -> None:
            kernel.fields["exp_avg_sq_scale"].view(torch.int32).add_(by)

        return wrong

    case = adamw(plan, "bfloat16")
    verdict = verdict_of(case, BF16, moved(3))
    assert not verdict.problems and verdict.codes["exp_avg_sq_codes"].of == 4900  # whose codes are still counted
    problems = verdict_of(case, BF16, moved(2**14)).problems  # by 2^-9: within the cells of all its codes
    assert [p for p in problems if p.startswith("exp_avg_sq_scale: ")]


def test_a_code_two_off_and_a_nan_fail() -> None:
    def two(kernel: compare.Stored) -> None:
        codes = kernel.fields["exp_avg_sq_codes"].view(-1)
        codes[7] = codes[7] + 3 if codes[7] < 128 else codes[7] - 3

    def nan(kernel: compare.Stored) -> None:
        kernel.p.view(-1)[9] = math.nan

    case = adamw("int8_split24", "bfloat16")
    assert any(p.startswith("exp_avg_sq of here: element 7 ") for p in verdict_of(case, BF16, two).problems)
    assert any("element 9 is nan" in p for p in verdict_of(case, BF16, nan).problems)


def test_a_visible_weight_that_does_not_round_the_kept_one_fails() -> None:
    def wrong(kernel: compare.Stored) -> None:
        kernel.p.view(-1)[11] *= 1.125

    problems = verdict_of(adamw("fp32_master", "bfloat16"), BF16, wrong).problems
    assert [p for p in problems if p.startswith("visible weight of here: element 11 ")] == problems


def test_counts_allow_for_chance() -> None:
    count = compare.Count()
    assert count.ok  # nothing seen, nothing expected
    count.add(int(100 + 6 * math.sqrt(100) + 4), 100.0, 10**6)
    assert count.ok
    count.add(1, 0.0, 1)
    assert not count.ok


def test_the_reference_leaves_no_division_to_the_device_s_ways_with_numbers() -> None:
    """torch divides by a number that the host knows with its reciprocal on CUDA, and any number with the tensor's: none
    stands beside a division in printed text, and `quotient` hands the device tensors of its own."""
    found = []
    for path in sorted((ROOT / "generated").glob("*/*/reference.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Div | ast.Pow):
                continue
            numbers = all(isinstance(x, ast.Constant) for x in (node.left, node.right))  # 2**31
            if not numbers and any(isinstance(x, ast.Constant) for x in (node.left, node.right)):
                found.append(f"{path.parent.name}: {ast.unparse(node)}")
    assert not found

    divided: list[tuple[Any, ...]] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.div.Tensor:
                divided.append(args)
            return func(*args, **(kwargs or {}))

    x = torch.ones(5, device="meta")
    with Watch():
        for a, b in ((x, 127.0), (127.0, x), (x, x)):
            eager.quotient(a, b)
    assert [[y.device.type for y in args] for args in divided] == [["meta", "meta"]] * 3
    # As before on a CPU: 127 and 255 have no reciprocal in fp32.
    y = torch.arange(-300, 300, dtype=torch.float32)
    assert all(torch.equal(eager.quotient(y, c), (y.double() / c).float()) for c in (127.0, 255.0, 448.0))


# Launch settings ------------------------------------------------------------------------------------------------------


def test_tuning_holds_inside_its_block_only(monkeypatch: pytest.MonkeyPatch) -> None:
    class Kernels:
        TILE = {"f": 256, "g": 1024}
        TILES = {"g": 2}

    assert launch.Tuning().sizes(Kernels, "f") == (256, launch.TILES)  # type: ignore[arg-type]
    assert launch.Tuning(tile=512, tiles=8).sizes(Kernels, "g") == (512, 8)  # type: ignore[arg-type]

    def fail() -> None:
        with launch.tuned(launch.Tuning(warps=4)):
            assert launch._tuning.warps == 4
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert launch._tuning == launch.Tuning()


# Benchmarks -----------------------------------------------------------------------------------------------------------


def contender(name: str, kept: float, dtype: torch.dtype = BF16, family: str = "adamw") -> contenders.Contender:
    return contenders.Contender(name, family, dtype, 10.0, kept, lambda params: torch.optim.SGD(params, lr=0.1))


def test_batches_keep_the_first_beside_everybody_and_fit() -> None:
    family = [contender("first", 5), contender("a", 6), contender("b", 5), contender("c", 12, FP32), contender("d", 99)]
    runs, left_out = contenders.batches(family, 1000, memory=24_000)
    names = [[c.name for c in run] for run in runs]
    # first + a + b and their gradients take 18 bytes per element; c with its own gradients does not fit in as well
    assert names == [["first", "a", "b"], ["first", "c"]]
    assert [c.name for c in left_out] == ["d"]
    assert contenders.batches(family, 1000, memory=100) == ([], family)


def test_large_tensor_shrinks_to_fit() -> None:
    family = [contender("first", 5), contender("other", 12, FP32)]
    assert contenders.scaled(10**9, family, 1e12) == 10**9
    smaller = contenders.scaled(10**9, family, 10e9)
    assert smaller * 23 <= 10e9 < 2 * smaller * 23


def test_a_contender_that_fails_is_left_out_and_said_to_be() -> None:
    def refuse(params: Any) -> Any:
        raise RuntimeError("no such kernel")

    plan = bench.Plan("small", "Small", [(8,), (4, 4)], 3, in_a_row=2, warm_up=1, copy_bytes=64)
    bad = contenders.Contender("bad", "adamw", FP32, 12.0, 8.0, refuse)
    entrants = [contender("good", 4, FP32), bad, contender("other", 4, FP32)]
    section = bench.race(plan, entrants, bench.Timer(torch.device("cpu")), machine.Clock(100))
    assert [r["name"] for r in section["rows"]] == ["good", "other"]
    assert section["left_out"] == {"bad": "RuntimeError: no such kernel"}
    first, other = section["rows"]
    assert "device_ratio" not in first and other["device_ratio"]["n"] == 3
    assert first["gelements_s"]["median"] == pytest.approx(24e-9 / (first["device_ms"]["median"] * 1e-3))
    assert section["elements"] == 24


class Breaking:
    """An optimizer whose steps end in an error from a number on."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def step(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("steps", [0, 2, 6])  # at the first step, before anything is timed, and in the second round
def test_a_contender_that_fails_later_on_costs_nobody_else_a_row(steps: int) -> None:
    plan = bench.Plan("small", "Small", [(8,), (4, 4)], 3, in_a_row=1, warm_up=1, copy_bytes=64)
    bad = contenders.Contender("bad", "adamw", FP32, 12.0, 8.0, lambda params: Breaking(steps))
    entrants = [contender("good", 4, FP32), bad, contender("other", 4, FP32)]
    section = bench.race(plan, entrants, bench.Timer(torch.device("cpu")), machine.Clock(100))
    assert [r["name"] for r in section["rows"]] == ["good", "other"]
    assert section["left_out"] == {"bad": "OutOfMemoryError: CUDA out of memory"}
    assert [r["device_ms"]["n"] for r in section["rows"]] == [3, 3]


def test_rows_are_kept_as_they_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = bench.Plan("small", "Small", [(8,)], 2, warm_up=1, copy_bytes=64)
    entrants = [contender("one", 4, FP32), contender("two", 4, FP32, family="lion")]
    made, kept = [], []

    def once(size: int, device: torch.device) -> contenders.Copying:
        made.append(size)
        if len(made) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return contenders.Copying(size, device)

    monkeypatch.setattr(bench, "Copying", once)
    timer, clock = bench.Timer(torch.device("cpu")), machine.Clock(100)
    keep = lambda section: kept.append(json.loads(json.dumps(section)))  # noqa: E731
    section = bench.race(plan, entrants, timer, clock, keep=keep)
    assert [r["name"] for r in kept[0]["rows"]] == [r["name"] for r in section["rows"]] == ["one"]
    assert section["left_out"] == {"two": "OutOfMemoryError: CUDA out of memory"}
    assert kept[0]["copy_tb_s"]["n"] == 2

    broken = contenders.Contender("broken", "adamw", FP32, 12.0, 8.0, lambda params: Breaking(3))
    tuned = bench.tune([entrants[0], broken], 64, 2, timer, clock, [], keep)
    assert [[r["name"] for r in x["rows"]] for x in kept[-2:]] == [["one"], ["one"]]
    assert tuned["left_out"] == {"broken": "OutOfMemoryError: CUDA out of memory"}
    assert "Left out: broken (OutOfMemoryError" in "\n".join(report._tune(tuned))


def test_what_is_copied_cannot_be_compressed() -> None:
    assert len(contenders.Copying(2**16, torch.device("cpu")).source.unique()) == 256


def test_ratios_are_medians_of_rounds() -> None:
    """A round in which the machine was slow for all changes no ratio."""
    plan = bench.Plan("small", "Small", [(10,)], 3)
    times = {
        "a": bench.Times(device=[1.0, 10.0, 1.0]),
        "b": bench.Times(device=[2.0, 20.0, 2.0]),
        bench.COPY: bench.Times(device=[0.5, 5.0, 0.5]),
    }
    row = bench.row(plan, contender("b", 4), times, "a", moved=100)
    assert row["device_ratio"]["median"] == 2.0 and row["device_ratio"]["q1"] == row["device_ratio"]["q3"] == 2.0
    # 10 bytes for each of 10 elements in 2 s, where copying moves 100 in 0.5 s
    assert row["share_of_copy"]["median"] == 0.25


def test_nothing_starts_without_time() -> None:
    plan = bench.Plan("small", "Small", [(8,)], 3, copy_bytes=64)
    section = bench.race(plan, [contender("late", 4)], bench.Timer(torch.device("cpu")), machine.Clock(0.0))
    assert section["rows"] == [] and section["left_out"] == {"late": "no time left"}


def test_targets_are_judged_by_what_was_measured() -> None:
    def row(name: str, value: str, median: float) -> dict[str, Any]:
        return {"name": name, value: {"median": median}}

    sections = {
        "tensor": {"rows": [row("AdamW int8_split24", "share_of_copy", 0.9), row("FlashAdamW", "device_ratio", 1.4)]}
    }
    assert [t["verdict"] for t in bench.judge(sections)] == ["met", "missed", "not measured", "not measured"]


def test_another_package_of_a_peer_s_name_is_not_taken_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flashoptim.py").write_text("class FlashAdamW: ...\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "flashoptim", raising=False)
    found, missing = contenders.peers()
    monkeypatch.delitem(sys.modules, "flashoptim", raising=False)
    assert "another one: no cast_model" in missing["FlashOptim"]
    assert not any(c.name.startswith("Flash") for c in found)


def test_tables_are_markdown() -> None:
    head, rule, row, empty = report.table(["name", "ms"], [["a", "1.5"]])
    assert (head, row, empty) == ("| name |  ms |", "| a    | 1.5 |", "")
    assert rule == "|------|----:|"


def test_machine_names_make_file_names() -> None:
    assert machine.slug("NVIDIA H200") == "nvidia-h200"


# Processes ------------------------------------------------------------------------------------------------------------


WORK = """
import os, time
from pathlib import Path

def work(job):
    what, path = job
    if what == "raise":
        raise ValueError("no such kernel")
    if what == "hang":
        time.sleep(1000)
    if what == "end" or (what == "end once" and not Path(path).exists()):
        Path(path).touch()
        os._exit(3)
    return (what, os.getpid()), what != "lost"
"""


def test_a_process_that_is_lost_costs_nobody_else_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_work.py").write_text(WORK, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    work = importlib.import_module("some_work").work
    kinds = ["lost", "fine", "raise", "end", "end once", "hang", *["fine"] * 5]
    wanted = [(kind, str(tmp_path / f"{k}")) for k, kind in enumerate(kinds)]
    found = dict(workers.each(work, wanted, 2, time.monotonic() + 500, longest=10))
    assert set(found) == set(wanted)
    results = {kind: [found[job] for job in wanted if job[0] == kind] for kind in kinds}
    assert [r[0] for r in results["fine"]] == ["fine"] * 6 and results["end once"][0][0] == "end once"
    assert results["raise"][0].why == "ValueError: no such kernel"
    assert results["end"][0].why == "the process that ran it ended" and results["hang"][0].why == "not done after 10 s"
    # Whoever has said that it is lost is given nothing more.
    assert results["lost"][0][1] not in {r[1] for r in results["fine"]}
    assert list(workers.each(work, wanted, 2, time.monotonic(), longest=10)) == []


def test_the_start_of_a_process_is_no_job_s_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine it takes longer than a job may."""
    slow = "import multiprocessing, time\nif multiprocessing.parent_process():\n    time.sleep(2.5)\n"
    (tmp_path / "slow_work.py").write_text(slow + WORK, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    work = importlib.import_module("slow_work").work
    ((_, found),) = workers.each(work, [("fine", "")], 1, time.monotonic() + 500, longest=2)
    assert found[0] == "fine"


def test_a_process_that_keeps_its_context_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def job(outcome: Any) -> jobs.Job:
        return jobs.Job("stages", "here", lambda: outcome, (), 0)

    right, wrong = stages.Staged("here"), stages.Staged("here", ["a bit differs"])
    monkeypatch.setattr(jobs, "alive", lambda: False)
    assert jobs.run(job(right)) == (right, True) and jobs.run(job(wrong)) == (wrong, False)
    monkeypatch.setattr(jobs, "alive", lambda: True)
    assert jobs.run(job(wrong)) == (wrong, True)
    assert job(right).failed("the process ended") == stages.Staged("here", ["the process ended"])


# A run ----------------------------------------------------------------------------------------------------------------


def ran(problems: tuple[str, ...] = ()) -> Any:
    return lambda part, case: jobs.PARTS[part](case, problems=list(problems))


def job(part: str, case: str, *problems: str) -> jobs.Job:
    return jobs.Job(part, case, ran(problems), (part, case), 0)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a check whose halves are stand-ins; gives its exit code and report."""
    monkeypatch.setattr(report, "picture", lambda data, path: False)

    def do(bench_: Any, todo: list[jobs.Job] | Exception, *given: str) -> tuple[int, dict[str, Any], str]:
        def listed(self: Any) -> list[jobs.Job]:
            if isinstance(todo, Exception):
                raise todo
            return todo

        monkeypatch.setattr(gpu_check.Check, "bench", bench_)
        monkeypatch.setattr(gpu_check.Check, "todo", listed)
        chosen = gpu_check.arguments(["--device", "cpu", "--out", str(tmp_path / "out"), *given])
        check = gpu_check.Check(chosen)
        for path in chosen.merge:
            check.merge(path)
        code = check.run()
        return code, report_in(tmp_path / "out"), check.path.with_suffix(".md").read_text(encoding="utf-8")

    return do


SECTION = {"title": "One large tensor", "tensors": 1, "elements": 5, "copy_tb_s": None, "rows": [], "left_out": {}}
ONE_OF_EACH = {"correctness": "adamw.fp32", "stages": "lamb.fp32", "graphs": "AdamW", "moves": "a checkpoint"}
ALL = [job(part, case) for part, case in ONE_OF_EACH.items()]


def test_benchmarks_come_first_and_end_nothing(run: Any) -> None:
    seen = []

    def bench_(self: Any) -> None:
        seen.append("correctness" in self.data)
        self.keep("tensor", SECTION)
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    code, data, page = run(bench_, ALL)
    assert (code, seen) == (0, [False]) and data["tensor"] == SECTION
    assert "illegal memory access" in data["bench_error"] and "illegal memory access" in page
    assert data["correctness"]["ok"] and "## CUDA graphs\n\n1 of 1 settings give" in page
    assert "## Between device and host\n\n1 of 1 checks" in page


@pytest.mark.parametrize("part", ["correctness", "stages", "graphs", "moves"])
def test_what_is_wrong_or_was_not_run_decides(run: Any, part: str) -> None:
    code, data, page = run(lambda self: None, [*ALL, job(part, "another", "it is wrong")])
    assert code == 1 and "**another**: it is wrong" in page
    assert data[part]["outcomes"][-1]["problems"] == ["it is wrong"]
    code, data, page = run(lambda self: None, ALL, "--budget", "0")
    assert code == 1 and all(len(data[part]["not_run"]) == 1 for part in jobs.PARTS)
    assert "0 of 1 settings give the bits of steps outside a graph when they are replayed; 1 not run." in page
    assert "- not run: a checkpoint" in page


def test_whatever_ends_a_run_what_was_measured_is_written(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    keep = lambda self: self.keep("tensor", SECTION)  # noqa: E731
    code, data, page = run(keep, OSError("no file descriptors left"))
    assert code == 1 and "no file descriptors left" in data["correctness_error"] and "## One large tensor" in page

    def fail(data: Any, path: Any) -> bool:
        raise ValueError("no such font")

    monkeypatch.setattr(report, "picture", fail)
    code, data, page = run(keep, ALL)
    assert code == 0 and "correctness_error" not in data and "## One large tensor" in page

    def interrupt(self: Any) -> None:
        self.keep("gpt2", SECTION)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(interrupt, ALL)
    code, data, page = run(keep, ALL, "--only", "correctness")
    assert data["gpt2"] == SECTION


def test_a_gpu_that_never_answers_ends_the_run_with_its_report(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    monkeypatch.setattr(gpu_check, "GRACE", 0.2)
    monkeypatch.setattr(gpu_check.os, "_exit", lambda code: ended.set() if code == 1 else None)

    def hang(self: Any) -> None:
        self.keep("tensor", SECTION)
        assert ended.wait(60)

    _, data, page = run(hang, ALL, "--budget", "0")
    assert "did not answer" in data["run_error"] and "did not answer" in page and "## One large tensor" in page


def test_what_was_not_measured_again_stays(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "markdown", lambda data, picture: "")
    monkeypatch.setattr(bench, "judge", lambda data: [])
    measured = {**SECTION, "rows": [{"name": "AdamW fp32"}]}
    run(lambda self: self.keep("tensor", measured), ALL)
    _, data, _ = run(lambda self: self.keep("tensor", SECTION), ALL)
    assert data["tensor"] == measured


def test_two_halves_make_one_report(run: Any, tmp_path: Path) -> None:
    _, data, _ = run(lambda self: self.keep("tensor", SECTION), ALL, "--only", "bench")
    assert "correctness" not in data
    other = tmp_path / "other.json"
    report.write_json(other, {**data, "tensor": {**SECTION, "elements": 7}, "gpt2": SECTION})
    (tmp_path / "out" / next(iter((tmp_path / "out").glob("*.json"))).name).unlink()
    code, data, _ = run(lambda self: None, ALL, "--only", "correctness", "--merge", str(other))
    assert code == 0 and data["tensor"]["elements"] == 7 and {"gpt2", "correctness", "graphs"} <= set(data)
    report.write_json(other, {**data, "machine": {**data["machine"], "device": "another"}})
    with pytest.raises(ValueError, match="another device"):
        run(lambda self: None, ALL, "--merge", str(other))


def test_a_run_that_is_cut_short_has_seen_something_of_everything() -> None:
    listed = [*jobs.of_cases(catalog.cases(), "cpu", True), *jobs.of_stages("cpu"), *jobs.of_graphs("cpu")]
    found = jobs.in_order([*listed, *jobs.of_moves("cpu")])
    assert len({(j.part, j.case) for j in found}) == len(found) and found[0].case.startswith("adamw.")
    assert {j.part for j in found[: len(found) // 4]} == set(jobs.PARTS)
    assert {j.case.split(".")[0] for j in found if j.urgent == 0} == set(catalog.FIRST)
    assert pickle.loads(pickle.dumps(found)) == found


@pytest.mark.slow
@pytest.mark.parametrize("name", moves.CHECKS)
def test_states_that_change_places(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both places are the CPU here; and a side that begins with other weights is found out."""
    assert moves.check_one(name, torch.device("cpu")).problems == []
    made, plain = [], moves._step

    def other(optimizer: Any, params: Any, step: int) -> None:
        if optimizer not in made:
            made.append(optimizer)
        with torch.no_grad():
            params[0][0, 0] += len(made)
        plain(optimizer, params, step)

    monkeypatch.setattr(moves, "_step", other)
    assert any("tensor 0 (96, 80)" in problem for problem in moves.check_one(name, torch.device("cpu")).problems)


# Dry runs -------------------------------------------------------------------------------------------------------------


def dry_run(
    out: Path, *given: str, environment: dict[str, str], generated: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "gpu_check.py"), "--device", "cpu", "--out", str(out)]
    command += ["--generated", str(generated), *given]
    return subprocess.run(command, cwd=out, env=environment, capture_output=True, text=True, check=False)


def report_in(out: Path) -> dict[str, Any]:
    (path,) = out.glob("*.json")
    assert path.with_suffix(".md").is_file()
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def test_right_kernels_pass(tmp_path: Path, interpreter: dict[str, str]) -> None:
    given = ["--only", "correctness", "--kernels", "lion.fp32.float32", "--jobs", "2"]
    done = dry_run(tmp_path, *given, environment=interpreter)
    assert done.returncode == 0, done.stdout + done.stderr
    found = report_in(tmp_path)["correctness"]
    assert found["ok"] and found["failed"] == [] and found["not_run"] == []
    (outcome,) = found["outcomes"]
    assert outcome["kernels"] == ["lion.fp32.lion_float32"] and set(outcome["worst"]) == {"p", "exp_avg"}
    assert "1 of 1 settings agree" in done.stdout


def broken(tmp_path: Path, spec: str, plan: str, pattern: str, by: str) -> Path:
    """A folder whose package `generated` has the kernels of one plan changed."""
    folder = tmp_path / "broken"
    shutil.copytree(ROOT / "generated", folder / "generated", ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / "generated" / spec / plan / "triton_kernels.py"
    text = path.read_text(encoding="utf-8")
    changed = re.sub(pattern, by, text)
    assert changed != text
    path.write_text(changed, encoding="utf-8")
    return folder


def store(field: str, by: str, value: str = ".+") -> tuple[str, str]:
    """What changes the value that kernels store to a field; \\1 is the value, which looks like `value`."""
    return rf"put\({field}_ptr, at, ({value}), live, MASKED\)", f"put({field}_ptr, at, {by}, live, MASKED)"


def test_a_wrong_kernel_fails(tmp_path: Path, interpreter: dict[str, str]) -> None:
    """The moment grows by a hundredth of a percent more than it should."""
    folder = broken(tmp_path, "lion", "fp32", *store("exp_avg", r"(\1) * 1.0001"))
    given = ["--only", "correctness", "--kernels", "lion.fp32.float32"]
    done = dry_run(tmp_path, *given, generated=folder, environment=interpreter)
    assert done.returncode == 1, done.stdout + done.stderr
    found = report_in(tmp_path)["correctness"]
    assert not found["ok"] and any(p.startswith("exp_avg of ") for p in found["failed"][0]["problems"])
    assert "FAILED lion.fp32.float32" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lookahead_adamw.fp32.float32", "muon.fp32.float32.adamw"])
def test_kernels_that_follow_the_shape_or_the_step_pass(
    name: str, tmp_path: Path, interpreter: dict[str, str]
) -> None:
    given = ["--only", "correctness", "--kernels", name, "--budget", "4000"]
    (tmp_path / "out").mkdir()
    done = dry_run(tmp_path / "out", *given, environment=interpreter)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_a_kernel_that_cannot_run_fails(tmp_path: Path, interpreter: dict[str, str]) -> None:
    folder = broken(tmp_path, "lion", "fp32", r"update = sign\(", "update = no_such_name + sign(")
    given = ["--only", "correctness", "--kernels", "lion.fp32.float32"]
    done = dry_run(tmp_path, *given, generated=folder, environment=interpreter)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "no_such_name" in report_in(tmp_path)["correctness"]["failed"][0]["problems"][0]


@pytest.mark.slow
def test_wrong_rounding_of_codes_fails(tmp_path: Path, interpreter: dict[str, str]) -> None:
    """A code that is one off is within the bound of every single element: only counting finds it."""
    folder = broken(tmp_path, "lion", "int8_split24", *store("exp_avg_codes", r"(\1) ^ 1", r"rounded\(.+\)"))
    given = ["--only", "correctness", "--kernels", "lion.int8_split24.float32"]
    done = dry_run(tmp_path, *given, generated=folder, environment=interpreter)
    assert done.returncode == 1, done.stdout + done.stderr
    problems = " ".join(report_in(tmp_path)["correctness"]["failed"][0]["problems"])
    assert re.search(r"exp_avg_codes: \d+ of \d+ codes differ", problems)


@pytest.mark.slow
def test_quantized_kernels_and_a_huge_tensor_pass(tmp_path: Path, interpreter: dict[str, str]) -> None:
    given = ["--only", "correctness", "--quick", "--huge", "--kernels", "lion.int8_split24.bfloat16"]
    done = dry_run(tmp_path, *given, environment=interpreter)
    assert done.returncode == 0, done.stdout + done.stderr
    (outcome, huge) = report_in(tmp_path)["correctness"]["outcomes"]
    assert set(outcome["codes"]) == {"weight_low", "exp_avg_codes", "exp_avg_scale"}
    assert "elements" in huge["case"]


@pytest.mark.slow
def test_benchmarks_run(tmp_path: Path, interpreter: dict[str, str]) -> None:
    done = dry_run(tmp_path, "--only", "bench", "--tune", "--json", environment=interpreter)
    assert done.returncode == 0, done.stdout + done.stderr
    found = report_in(tmp_path)
    assert "bench_error" not in found, found.get("bench_error")
    for section in ("tensor", "gpt2", "llama_8b"):
        assert found[section]["rows"][0]["name"] == "AdamW int8_split24"
        assert found[section]["copy_tb_s"]["median"] > 0
    assert {"step_ms", "host_ms"} <= set(found["gpt2"]["rows"][0])
    assert [t["target"] for t in found["targets"]] == [t.words for t in bench.TARGETS]
    assert len(found["tune"]["rows"]) > 1
    assert json.loads(done.stdout.splitlines()[-1])["machine"] == found["machine"]
    # A later run of one half keeps what the other half found.
    again = dry_run(tmp_path, "--only", "correctness", "--kernels", "lion.fp32.float32", environment=interpreter)
    assert again.returncode == 0
    assert {"tensor", "correctness"} <= set(report_in(tmp_path))


def test_what_cannot_run_is_refused(tmp_path: Path, compiling: dict[str, str], interpreter: dict[str, str]) -> None:
    done = dry_run(tmp_path, environment=compiling)
    assert done.returncode == 2 and "set TRITON_INTERPRET=1" in done.stderr
    done = dry_run(tmp_path, "--device", "cuda", environment=interpreter)
    assert done.returncode == 2 and "TRITON_INTERPRET=1 is set" in done.stderr
    done = dry_run(tmp_path, generated=tmp_path, environment=interpreter)
    assert done.returncode == 2 and "no package `generated`" in done.stderr
    if not torch.cuda.is_available():
        done = dry_run(tmp_path, "--device", "cuda", environment=compiling)
        assert done.returncode == 2 and "no GPU" in done.stderr
    assert not list(tmp_path.glob("*.json"))


def test_nothing_of_the_compiler_is_imported(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path[:0] = [{tools!r}, {root!r}]\n"
        "from gpu import bench, catalog, compare, contenders, correct, machine, report, shapes\n"
        "catalog.cases()\n"
        "loaded = sorted(m for m in sys.modules if m.startswith('optgen.') and not m.startswith('optgen.runtime'))\n"
        "assert not loaded and 'jinja2' not in sys.modules and 'specs' not in sys.modules, loaded\n"
    ).format(tools=str(ROOT / "tools"), root=str(ROOT))
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
