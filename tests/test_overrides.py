"""Plans of single parameters: `overrides`, and modules that keep their states in fp32 under every optimizer."""

import copy
import gc
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import optgen
from optgen.optim import AdamW
from optgen.runtime import Optimizer
from optgen.runtime.records import fp32_modules
from tests.harness import same_bits
from tests.training import same, through_file


class Net(nn.Module):
    """An embedding, a norm, a matrix, and a head: all but the norm larger than what a plan calls small."""

    def __init__(self, embedding: type[nn.Embedding] = nn.Embedding) -> None:
        super().__init__()
        self.embed = embedding(65, 80)
        self.norm = nn.LayerNorm(80)
        self.body = nn.Linear(80, 70, bias=False)
        self.head = nn.Linear(70, 65, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(self.norm(self.embed(x)))))


def net(dtype: torch.dtype = torch.bfloat16, embedding: type[nn.Embedding] = nn.Embedding) -> Net:
    torch.manual_seed(0)
    model = Net(embedding)
    optgen.cast_model(model, dtype)
    return model


def train(opt: Optimizer, model: Net, steps: int, seed: int = 1) -> None:
    source = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randint(0, 65, (8, 12), generator=source)
        nn.functional.cross_entropy(model(x).float().flatten(0, 1), x.flatten()).backward()
        opt.step()
        opt.zero_grad()


def in_fp32(opt: Optimizer) -> set[str]:
    """The parameters whose moments are all kept in fp32."""
    found = {str(e.name): [t for key, t in opt.state[e.p].items() if key.startswith("exp_avg")] for e in opt._entries()}
    return {name for name, kept in found.items() if kept and all(t.dtype is torch.float32 for t in kept)}


# -- which parameters a rule means -------------------------------------------------------------------------------
SMALL = {"norm.weight", "norm.bias"}
"""In fp32 under every plan of 8 bits, whatever is said."""

RULES: dict[str, tuple[Callable[[Net], Any], set[str]]] = {
    "a pattern": (lambda m: "*embed*", {"embed.weight"}),
    "a module's name": (lambda m: "body", {"body.weight"}),
    "a size": (lambda m: "numel < 5_200", {"head.weight"}),
    "a size, inclusive": (lambda m: "numel<=5200", {"head.weight", "embed.weight"}),
    "a class": (lambda m: nn.Linear, {"body.weight", "head.weight"}),
}


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("kind", RULES)
def test_a_rule_holds_for_what_it_names_and_nothing_else(kind: str, named: bool) -> None:
    model = net()
    key, wanted = RULES[kind]
    params = model.named_parameters() if named else model.parameters()
    opt = AdamW(params, plan="int8_split24", overrides={key(model): "fp32"}, module=model)
    train(opt, model, 1)
    names = [name for name, _ in model.named_parameters()]
    assert (in_fp32(opt) if named else {names[int(i)] for i in in_fp32(opt)}) == wanted | SMALL
    reported = {name for name, plan in opt.plans().items() if "fp32" in plan}
    assert {name if isinstance(name, str) else names[name] for name in reported} - SMALL == wanted
    assert {p.name for p in opt.memory().parameters if "fp32" in p.plan} == reported


def test_the_first_rule_that_holds_wins() -> None:
    model = net()
    rules = {"embed": "bf16_sr", "*.weight": "fp32", "head.weight": "bf16"}
    opt = AdamW(model.named_parameters(), overrides=rules)
    assert opt.plans() == {
        "embed.weight": "bf16_sr",
        "norm.weight": "int8_split24 (fp32 states)",
        "norm.bias": "int8_split24",
        "body.weight": "int8_split24 (fp32 states)",
        "head.weight": "int8_split24 (fp32 states)",
    }


@pytest.mark.parametrize(
    ("dtype", "plan", "kept"),
    [
        (torch.bfloat16, "int8_split24", {"weight_low": torch.uint8}),  # the plan's 24 bits of the weight stay
        (torch.bfloat16, "bf16_sr", {"weight_master": torch.float32}),  # no plan for small tensors: a full copy
        (torch.bfloat16, "fp32_master", {"weight_master": torch.float32}),
        (torch.float32, "int8", {}),
        (torch.float32, "bf16_sr", {}),
    ],
)
def test_fp32_takes_nothing_from_the_weight(dtype: torch.dtype, plan: str, kept: dict[str, torch.dtype]) -> None:
    model = net(dtype)
    opt = AdamW(model.named_parameters(), plan=plan, overrides={"embed": "fp32"})
    train(opt, model, 1)
    state = opt.state[model.embed.weight]
    assert {key: value.dtype for key, value in state.items() if isinstance(value, Tensor)} == {
        "exp_avg": torch.float32, "exp_avg_sq": torch.float32, **kept,
    }  # fmt: skip


def test_the_step_is_that_of_the_plan_it_names() -> None:
    """Beside an optimizer that has the parameter in a group of its own."""
    model, other = net(), net()
    names = dict(other.named_parameters())
    opt = AdamW(model.named_parameters(), plan="int8_split24", seed=5, overrides={"embed": "split32"})
    embed = {"params": [("embed.weight", names.pop("embed.weight"))], "plan": "split32"}
    split = AdamW([embed, {"params": list(names.items())}], plan="int8_split24", seed=5)
    train(opt, model, 4)
    train(split, other, 4)
    same(model, other, opt, split)
    assert len(opt.param_groups) == 1


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("emebd.weight", "'emebd.weight' matches no parameter; did you mean 'embed.weight'"),
        ("*embd*", "'*embd*' matches no parameter; did you mean 'embed'?"),
        ("bdoy", "'bdoy' matches no parameter; did you mean 'body'?"),
        ("decoder.*", "matches no parameter"),
        (nn.BatchNorm1d, "BatchNorm1d matches no parameter"),
        ("numel 4", "expected a size such as 'numel < 16384', got 'numel 4'"),
    ],
)
def test_a_rule_that_means_nothing_is_refused(key: Any, said: str) -> None:
    model = net()
    with pytest.raises(ValueError, match=re.escape(said)):
        AdamW(model.named_parameters(), overrides={key: "fp32"}, module=model)


def test_what_cannot_be_told_is_refused_with_the_way_to_tell_it() -> None:
    model = net()
    with pytest.raises(ValueError, match=r"the parameters have none: give model.named_parameters\(\)"):
        AdamW(model.parameters(), overrides={"embed": "fp32"})
    with pytest.raises(ValueError, match=r"LayerNorm is a class of modules.*AdamW\(..., module=model\)"):
        AdamW(model.named_parameters(), overrides={nn.LayerNorm: "fp32"})
    with pytest.raises(ValueError, match="no plan `fp23`"):
        AdamW(model.named_parameters(), overrides={"embed": "fp23"})
    with pytest.raises(TypeError, match=r"overrides\['embed'\]: expected a plan's name, got 32"):
        AdamW(model.named_parameters(), overrides={"embed": 32})
    with pytest.raises(TypeError, match="a key must be a pattern"):
        AdamW(model.named_parameters(), overrides={3: "fp32"})
    with pytest.raises(TypeError, match="overrides must be a dict"):
        AdamW(model.named_parameters(), overrides="fp32")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"module must be a torch.nn.Module or None, got list"):
        AdamW(model.named_parameters(), overrides={"embed": "fp32"}, module=[])


def test_parameters_of_one_name_cannot_be_told_apart() -> None:
    model = net()
    twice = [("w", model.body.weight), ("w", model.head.weight)]
    with pytest.raises(ValueError, match="two parameters of a group are called 'w'"):
        AdamW(twice, overrides={"numel < 5000": "fp32"})


# -- in use ------------------------------------------------------------------------------------------------------
MIXED = {"embed": "fp32", "numel < 5000": "split32"}


def groups_of(model: Net) -> list[dict[str, Any]]:
    """Two groups, as the trainers of language models make them."""
    decay = [(n, p) for n, p in model.named_parameters() if p.ndim > 1]
    rest = [(n, p) for n, p in model.named_parameters() if p.ndim <= 1]
    return [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]


def mixed(model: Net, **options: Any) -> Optimizer:
    return AdamW(groups_of(model), lr=1e-2, seed=3, overrides=MIXED, **options)


def test_the_short_way_of_a_step_sees_a_plan_that_is_taken_back() -> None:
    model = net()
    opt = mixed(model, backend="cpp")
    train(opt, model, 3)
    opt.param_groups[0]["overrides"] = ()
    with pytest.raises(RuntimeError, match="does not fit it"):
        train(opt, model, 1)


def test_a_group_has_rules_of_its_own() -> None:
    model = net()
    groups = groups_of(model)
    groups[0]["overrides"] = {"head": "fp32", "embed": "bf16_sr"}
    opt = AdamW(groups, overrides={"embed": "fp32", "norm": "fp32"})
    assert opt.plans()["embed.weight"] == "bf16_sr" and opt.plans()["head.weight"] == "int8_split24 (fp32 states)"
    groups = groups_of(model)
    groups[1]["overrides"] = {"head": "fp32"}
    with pytest.raises(ValueError, match="'head' matches no parameter"):
        AdamW(groups)


def test_rules_in_the_place_of_a_record_are_refused() -> None:
    """Not ignored: as one sets a rate, one may try to set rules in a group."""
    model = net()
    opt = AdamW(model.named_parameters(), plan="int8_split24", backend="cpp")
    train(opt, model, 2)
    before = copy.deepcopy(model.state_dict())
    opt.param_groups[0]["overrides"] = {"*embed*": "fp32"}
    with pytest.raises(TypeError, match=r"expected the record of what was decided.*overrides= of the optimizer"):
        train(opt, model, 1)
    assert all(same_bits(before[key], value) for key, value in model.state_dict().items())
    assert "overrides={'*embed*': 'fp32'}" in repr(opt)  # looking at it still works


def test_groups_of_one_optimizer_make_another() -> None:
    """As wrappers do that build an optimizer from the groups of one."""
    model = net()
    opt = mixed(model)
    again = AdamW([{**g, "params": list(zip(g["param_names"], g["params"], strict=True))} for g in opt.param_groups])
    assert again.plans() == opt.plans()
    assert AdamW(opt.param_groups).plans() == opt.plans()  # their names stand beside the parameters
    with pytest.raises(ValueError, match=r"it has no parameter 'embed.weight'"):
        AdamW([{"params": model.body.parameters(), "overrides": opt.param_groups[0]["overrides"]}])


def test_a_checkpoint_brings_its_plans_and_says_where_they_were_changed() -> None:
    model = net()
    opt = mixed(model)
    train(opt, model, 2)
    other = copy.deepcopy(model)
    again = AdamW(groups_of(other), overrides={"body": "bf16_sr"})
    with pytest.warns(UserWarning, match=r"keeps 5 parameters otherwise.*'embed.weight' has fp32_states, not None"):
        again.load_state_dict(opt.state_dict())
    assert again.plans() == opt.plans()
    train(opt, model, 2, seed=9)
    train(again, other, 2, seed=9)
    same(model, other, opt, again)


def test_a_file_says_its_plans_and_conversion_keeps_them(tmp_path: Any) -> None:
    from optgen.driver import checkpoints

    model = net()
    opt = AdamW(model.named_parameters(), plan="int8_split24", overrides={"embed": "fp32", "head": "split32"})
    train(opt, model, 2)
    optgen.save_checkpoint(tmp_path / "a.pt", opt, model)
    assert not checkpoints.verify(str(tmp_path / "a.pt"))["findings"]
    checkpoints.convert(str(tmp_path / "a.pt"), str(tmp_path / "b.pt"), to="bf16_sr")
    other = net()
    again = AdamW(other.named_parameters(), plan="bf16_sr", overrides={"embed": "fp32", "head": "split32"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optgen.load_checkpoint(tmp_path / "b.pt", again, other)
    assert again.plans()["embed.weight"] == "fp32_master"
    assert again.plans()["head.weight"] == "split32" and again.plans()["body.weight"] == "bf16_sr"
    key = opt.state[model.embed.weight]["exp_avg"]
    assert torch.equal(again.state[other.embed.weight]["exp_avg"], key)
    full = opt.master_state_dict(model)["embed.weight"]
    assert torch.equal(again.state[other.embed.weight]["weight_master"], full)


# -- modules that say it themselves ------------------------------------------------------------------------------
def assigned(model: Net) -> Net:
    """Other Parameter objects, as loading into a model without memory makes them."""
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    return model


FATES: dict[str, Callable[[Net], Net]] = {
    "as it is": lambda m: m,
    "deepcopy": copy.deepcopy,
    "pickled": lambda m: through_file(m, weights_only=False),
    ".to()": lambda m: m.to(torch.float32).to(torch.bfloat16),
    "assigned": assigned,
}


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("fate", FATES)
def test_the_states_of_a_stable_embedding_are_fp32_whatever_became_of_it(fate: str, named: bool) -> None:
    model = FATES[fate](net(embedding=optgen.StableEmbedding))
    opt = AdamW(model.named_parameters() if named else model.parameters(), plan="int8_split24")
    train(opt, model, 1)
    names = [name for name, _ in model.named_parameters()]
    found = in_fp32(opt) if named else {names[int(i)] for i in in_fp32(opt)}
    assert found == SMALL | {"embed.weight", "embed.norm.weight", "embed.norm.bias"}


def test_overrides_come_before_marks_and_marks_end_with_their_module() -> None:
    model = net(embedding=optgen.StableEmbedding)
    opt = AdamW(model.named_parameters(), overrides={"embed.weight": "int8_split24"})
    train(opt, model, 1)
    assert in_fp32(opt) == SMALL | {"embed.norm.weight", "embed.norm.bias"}
    gc.collect()  # what earlier tests have left
    before = len(fp32_modules.parameters())
    del model, opt
    gc.collect()
    assert len(fp32_modules.parameters()) == before - 3


def test_tied_weights_of_a_marked_module_are_marked() -> None:
    model = nn.ModuleDict({"embed": optgen.StableEmbedding(65, 70), "head": nn.Linear(70, 65, bias=False)})
    model["head"].weight = model["embed"].weight
    opt = AdamW(model["head"].named_parameters(), plan="int8")
    assert opt.plans() == {"weight": "int8 (fp32 states)"}


def test_the_stable_embedding_is_that_of_bitsandbytes() -> None:
    import bitsandbytes

    indices = torch.tensor([[3, 0, 7], [1, 3, 3]])
    for options in ({}, {"padding_idx": 3}, {"max_norm": 0.1, "scale_grad_by_freq": True}):
        outputs = []
        for cls in (bitsandbytes.nn.StableEmbedding, optgen.StableEmbedding):
            torch.manual_seed(4)
            module = cls(9, 16, **options)
            made = module(indices)
            made.square().mul(torch.arange(16)).sum().backward()
            outputs.append((module.weight, made, module.weight.grad, module.norm.weight.grad, *module.state_dict()))
        assert all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(*outputs, strict=True)), (
            options
        )
    bound = (6 / (9 + 16)) ** 0.5  # Xavier: uniform in the root of 6 / (fan in + fan out), both ways
    own = optgen.StableEmbedding(9, 16).weight.detach()
    assert 0.9 * bound < own.abs().max() <= bound


def test_memory_says_what_each_plan_takes() -> None:
    model = nn.ModuleDict({"a": nn.Linear(64, 128, bias=False), "b": nn.Linear(64, 64, bias=False)}).bfloat16()
    text = str(AdamW(model.named_parameters(), overrides={"b": "fp32"}).memory())
    assert "2 tensors, 12,288 elements, plan int8_split24, int8_split24 (fp32 states)\n" in text
    # 2 bytes of the weight, 1 of its low bits, 1 for each moment; 64 elements share 4 bytes.  8 bytes in fp32.
    assert "\n  int8_split24: 1 tensor, 8,192 elements, 5.0625 bytes each\n" in text
    assert text.endswith("\n  int8_split24 (fp32 states): 1 tensor, 4,096 elements, 11.0000 bytes each")
