"""`optgen.make` of rules of matrices: which parameters take which step, and what a caller changes of that."""

import copy
import re
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import optgen
from optgen import roles
from tests.training import alike, params_of, train

SMALL: dict[str, Any] = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4)
WORDS: dict[str, Any] = dict(vocab_size=100, bos_token_id=1, eos_token_id=2, pad_token_id=0)
LM = "lm_head.weight"
HF: Any = [
    ("LlamaForCausalLM", dict(WORDS, num_key_value_heads=2), LM, {}),
    ("LlamaForCausalLM", dict(WORDS, tie_word_embeddings=True), None, {}),
    ("Phi3ForCausalLM", dict(WORDS, num_key_value_heads=2), LM,
     {"qkv_proj.weight": (64, 32, 32), "gate_up_proj.weight": 2}),
    ("GPTNeoXForCausalLM", WORDS, LM, {"query_key_value.weight": 12}),
    ("MixtralForCausalLM", dict(WORDS, num_local_experts=4), LM, {"experts.gate_up_proj": 4, "experts.down_proj": 4}),
    ("ViTForImageClassification", dict(image_size=32, patch_size=8), "classifier.weight", {}),
]  # fmt: skip
"""Models, options of their configs, the head, and what falls into blocks."""


def by_role(opt: Any) -> dict[str, list[str]]:
    return {group["role"]: group["param_names"] for group in opt.param_groups}


def blocks_of(opt: Any) -> dict[str, Any]:
    """Return the blocks of matrices by the ends of their names."""
    return {re.sub(r".*(attn|attention|mlp)\.", "", name): n for name, n in opt.param_groups[0].get("blocks", ())}


@pytest.mark.parametrize(("name", "options", "head", "blocks"), HF)
def test_models_of_transformers(name: str, options: dict[str, Any], head: str | None, blocks: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    cls = getattr(transformers, name)
    net = cls(cls.config_class(**SMALL, **options))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt: Any = optgen.make("muon", net, plan="fp32")
    found, shapes = by_role(opt), {n: p.shape for n, p in net.named_parameters()}
    assert found.get("head") == ([head] if head else None)
    assert found.get("stem", []) == [n for n in shapes if "patch_embeddings.projection.w" in n]
    assert all(len(shapes[n]) > 1 and "layers" in n for n in found["hidden"])
    assert all("emb" in n for n in found["embedding"]) and all(len(shapes[n]) == 1 for n in found["vector"])
    assert sorted(n for names in found.values() for n in names) == sorted(shapes)
    assert blocks_of(opt) == blocks == blocks_of(optgen.make("soap_muon", net, plan="fp32")) | blocks


class Net(nn.Module):
    """A stem, a convolution of one dimension, attention, adapters, tokens and a head of a name like any other."""

    def __init__(self) -> None:
        super().__init__()
        self.cls_token, self.patches = nn.Parameter(torch.zeros(1, 2, 16)), nn.Conv1d(3, 16, 8)
        self.narrow, self.attention = nn.Conv1d(16, 16, 9), nn.MultiheadAttention(16, 2)
        self.layers = nn.ModuleList([nn.Linear(16, 16), nn.LayerNorm([16, 16])])
        self.lora_A, self.lora_B = nn.Linear(16, 2, bias=False), nn.Linear(2, 16, bias=False)
        self.logits = nn.Linear(16, 5)


def test_parameters_are_sorted_by_layers_names_and_the_caller() -> None:
    net = Net()
    found = by_role(opt := optgen.make("muon", net, plan="fp32", adamw_lr=5e-4))
    vectors = found.pop("vector")
    assert found == {
        "hidden": ["narrow.weight", "attention.in_proj_weight", "attention.out_proj.weight", "layers.0.weight"],
        "lora_b": ["lora_B.weight"], "lora_a": ["lora_A.weight"], "embedding": ["cls_token"], "head": ["logits.weight"],
        "stem": ["patches.weight"],
    }  # fmt: skip
    assert {"layers.1.weight", "logits.bias"} <= {*vectors}
    assert dict(opt.param_groups[0]["blocks"]) == {"narrow.weight": 1, "attention.in_proj_weight": 3}
    assert [(g["lr"], g["adamw"]) for g in opt.param_groups] == [(1e-3, False)] * 2 + [(5e-4, True)] * 5
    assert "of narrow.weight, attention.in_proj_weight, attention.out_proj.weight, layers.*.weight, role" in repr(opt)
    given: Any = {"lora": "hidden", lambda name, p: p.shape[-1] == 9: "stem", r"^layers\.0": "head"}
    own: Any = optgen.make("muon", net, plan="fp32", sort=given, blocks={"*.in_proj_weight": 6})
    assert by_role(own)["hidden"] == [
        "attention.in_proj_weight", "attention.out_proj.weight", "lora_A.weight", "lora_B.weight", "logits.weight",
    ]  # fmt: skip
    assert dict(own.param_groups[0]["blocks"])["attention.in_proj_weight"] == 6
    convolutions = {"narrow": 1, "patches": 1}
    for plain in (dict(sort=False), dict(adamw=True)):
        assert "role" not in optgen.make("muon", net, plan="fp32", blocks=convolutions, **plain).param_groups[0]
    other = optgen.make("scion", net, plan="fp32").param_groups
    assert [g["sign_norm"] for g in other] == [g["role"] in ("head", "embedding") for g in other]
    mlp = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    assert by_role(optgen.make("muon", mlp, plan="fp32"))["head"] == ["4.weight"]
    assert by_role(optgen.make("muon", mlp[0], plan="fp32")).keys() == {"hidden", "vector"}
    several = nn.ModuleDict({"heads": nn.ModuleDict({"a": nn.Linear(6, 2), "1": nn.Linear(6, 3)}), "body": mlp[:3]})
    assert by_role(optgen.make("muon", several, plan="fp32"))["head"] == ["heads.a.weight", "heads.1.weight"]
    attention = nn.ModuleDict({"up": nn.Linear(6, 4), "attention": nn.MultiheadAttention(4, 2, kdim=3)})
    assert "head" not in by_role(optgen.make("muon", attention, plan="fp32"))


def test_names_of_adapters_and_wrappers() -> None:
    wanted = {
        "base_model.model.lm_head.modules_to_save.default.weight": "head", "module.embed_tokens.original_module.weight":
        "embedding", "a.q_proj.lora_B.default.weight": "lora_b", "a.lora_down.weight": "lora_a", "h.0.mixer.A_log":
        "vector", "_orig_mod.wte.weight": "embedding", "m.embed_tokens.lora_embedding_A.default": "embedding",
        "layers.3.output.weight": "hidden", "pos": "embedding", "blocks.0.attn.relative_position_bias_table": "vector",
        "a.q_proj.base_layer.weight": "hidden", "m.exploration.weight": "hidden",
    }  # fmt: skip
    assert roles.find([(name, torch.zeros(4, 6)) for name in wanted]) == wanted


def test_a_sorted_optimizer_resumes_also_from_one_of_a_single_group() -> None:
    nets = [Net() for _ in range(2)]
    opt, again = (optgen.make("muon", net, lr=0.02 * 2**i) for i, net in enumerate(nets))
    train(opt, range(2))
    nets[1].load_state_dict(nets[0].state_dict())
    again.load_state_dict(copy.deepcopy(opt.state_dict()))
    for one in (opt, again):
        train(one, range(2, 4))
    assert alike(opt.state_dict(), again.state_dict())
    assert alike(*([p.detach() for p in params_of(one)] for one in (opt, again)))
    blocks = {"narrow": 1, "patches": 1, "attention.in_proj_weight": 3}
    whole = optgen.make("muon", nets[0], lr=0.1, sort=False, blocks=blocks)
    again.load_state_dict(whole.state_dict())  # its options win
    assert {g["lr"] for g in again.param_groups} == {0.1}


@pytest.mark.parametrize(
    ("rule", "given", "words"),
    [
        ("muon", {"sort": {"logits": "heads"}}, "expected one of hidden, lora_b, .* got 'heads'"),
        ("muon", {"sort": {"encoder": "head"}}, r"sort\['encoder'\]: matches no parameter"),
        ("muon", {"sort": {"(": "head"}}, "is no regular expression of names"),
        ("muon", {"sort": {nn.LayerNorm: "vector"}}, "is no regular expression of names"),
        ("soap", {"sort": True}, r"SOAP has one step for all: .*make\({pattern: 'soap', '\*': 'adamw'}, model\)"),
        ({"logits": "muon", "*": "adamw"}, {"sort": True}, "several rules are sorted by their patterns"),
    ],
)
def test_what_cannot_be_sorted_is_refused(rule: Any, given: dict[str, Any], words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        optgen.make(rule, Net(), **given)
    with pytest.raises(TypeError, match="go by names: take the model"):
        optgen.make("muon", list(Net().parameters()), sort=True)
