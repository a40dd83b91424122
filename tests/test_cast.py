"""cast_model: what is cast, what stays, and that the model still runs."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from optgen.cast import cast_model
from optgen.optim import AdamW
from tests.training import through_file


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight  # tied
        self.scale = nn.Parameter(torch.ones(8))
        self.register_buffer("freq", torch.linspace(0, 1, 8))
        self.register_buffer("ids", torch.arange(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.body(self.embed(x))) * self.scale + self.freq)


def dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    return {name: t.dtype for name, t in model.state_dict().items()}


def test_casts_all_but_batch_norm_and_integers() -> None:
    model = Net()
    before = dict(model.named_parameters())
    assert cast_model(model, torch.bfloat16) is model
    for name, dtype in dtypes(model).items():
        if name in ("ids", "norm.num_batches_tracked"):
            assert dtype == torch.int64
        else:
            assert dtype == (torch.float32 if name.startswith("norm.") else torch.bfloat16), name
    assert all(before[name] is p for name, p in model.named_parameters())
    assert model.head.weight is model.embed.weight
    assert model(torch.arange(4)).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        (["body"], {"body.0.weight", "body.0.bias", "body.1.weight", "body.1.bias", "body.2.weight", "body.2.bias"}),
        (["body.1"], {"body.1.weight", "body.1.bias"}),
        (["body.*.bias", "freq"], {"body.0.bias", "body.1.bias", "body.2.bias", "freq"}),
        (["head"], {"head.weight", "embed.weight"}),  # tied
    ],
)
def test_keep(keep: list[str], kept: set[str]) -> None:
    model = cast_model(Net(), torch.float16, keep)
    fp32 = {name for name, dtype in dtypes(model).items() if dtype == torch.float32 and not name.startswith("norm.")}
    assert fp32 == kept


def test_kept_modules_fit_in_between() -> None:
    torch.manual_seed(0)
    model = Net()
    x = torch.arange(6)
    want = copy.deepcopy(model)(x)
    cast_model(model, torch.bfloat16, ["body.0", "head", "embed"])
    cast_model(model, torch.bfloat16, ["body.0", "head", "embed"])
    assert len(model.body[0]._forward_hooks) == 1
    seen = []
    handle = model.body[0].register_forward_hook(lambda m, args, out: seen.append(args[0].dtype))
    out = model(x)
    assert seen == [torch.float32]
    assert out.dtype == torch.bfloat16
    # eight roundings to bf16 at most on the way of values of order max|want|
    assert (out - want).abs().max() <= 8 * 2**-8 * want.abs().max()
    out.sum().backward()
    assert model.body[0].weight.grad.dtype == torch.float32
    handle.remove()
    assert torch.equal(through_file(model, weights_only=False)(x), copy.deepcopy(model)(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("keep", "keep_outputs", "name"),
    [
        (["head"], ["head"], "head"),
        (["body.0", "embed", "head"], ["*ead"], "head"),
        (["*"], ["again"], "head"),  # another name of it
        (["body.*"], ["body.2"], "body.2"),
        (["body"], ["body"], "body"),
    ],
)
def test_outputs_of_kept_modules_stay_where_they_are_named(
    keep: list[str], keep_outputs: list[str], name: str, dtype: torch.dtype
) -> None:
    """The module alone, and the model that ends with it; a later call may say otherwise."""
    torch.manual_seed(0)
    model = Net()
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    model.again, module = model.head, model.get_submodule(name)
    x = torch.randn(3, 8).to(dtype)
    want = module(x.float())
    for named in (keep_outputs, [], keep_outputs):
        cast_model(model, dtype, keep, keep_outputs=named)
        assert torch.equal(module(x), want if named else want.to(dtype))
        if name == "head":
            (out := model(torch.arange(6))).sum().backward()
            assert out.dtype == (torch.float32 if named else dtype)
            assert model.head.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("name", ["body", "body.2", "head"])
def test_cast_back_a_kept_module_is_one_like_the_others(name: str) -> None:
    torch.manual_seed(0)
    model = Net()
    x = torch.arange(6)
    want = copy.deepcopy(model)(x)
    cast_model(model, torch.bfloat16, [name, "freq"])  # buffers keep no low bits
    cast_model(model, torch.float32)
    assert torch.equal(model(x), want)
    module = model.get_submodule(name)
    assert not (module._forward_hooks or module._forward_pre_hooks or module._forward_pre_hooks_with_kwargs)


def test_lazy_modules_are_cast_before_they_have_numbers() -> None:
    model = cast_model(nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 2)), torch.bfloat16)
    assert model(torch.ones(1, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert set(dtypes(model).values()) == {torch.bfloat16}


def test_gradients_follow() -> None:
    model = nn.Linear(3, 2)
    model(torch.ones(3)).sum().backward()
    cast_model(model, torch.bfloat16)
    assert model.weight.grad.dtype == torch.bfloat16
    assert torch.equal(model.weight.grad, torch.ones(2, 3, dtype=torch.bfloat16))


@pytest.mark.parametrize("shard", ["distribute_tensor", "fully_shard"])
@pytest.mark.usefixtures("one_rank")
def test_dtensors_are_refused_and_nothing_is_cast(shard: str) -> None:
    """Setting their .data would change the dtype that they name, and not that of their part on this rank."""
    mesh = init_device_mesh("cpu", (1,))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if shard == "fully_shard":
        fully_shard(model[1], mesh=mesh)
    else:
        model[1].weight = nn.Parameter(distribute_tensor(model[1].weight.detach(), mesh, [Shard(0)]))
    with pytest.raises(TypeError, match=r"'1.weight' is a DTensor.* before it is sharded .*model.to\(torch"):
        cast_model(model, torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model[1].weight.to_local().dtype == torch.float32
    cast_model(model, torch.bfloat16, keep=["1"])
    assert dtypes(model)["0.weight"] == torch.bfloat16
    model.to(torch.bfloat16)
    opt = AdamW(model.parameters(), plan="fp32_master")
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    opt.step()
    assert model[1].weight.to_local().dtype == torch.bfloat16


@pytest.mark.usefixtures("one_rank")
def test_low_bits_that_sharding_leaves_behind_are_missed() -> None:
    """Once for each model, at the user's line, with module= and without; other parameters are not warned of."""
    mesh = init_device_mesh("cpu", (1,))
    models = [nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)) for _ in range(2)]
    full = copy.deepcopy(models[0].state_dict())
    for model in models:
        fully_shard(cast_model(model, torch.bfloat16), mesh=mesh)
    with pytest.warns(UserWarning, match="AdamW: the low bits that cast_model kept for 4 parameters") as seen:
        AdamW(models[0].parameters(), plan="fp32_master", module=models[0])
    with pytest.warns(UserWarning, match="load_master_state_dict") as later:
        AdamW(models[1].named_parameters(), plan="fp32_master")
    assert [(len(x), x[0].filename) for x in (seen, later)] == [(1, __file__)] * 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt = AdamW(models[0].parameters(), plan="fp32_master", module=models[0])
        opt.load_master_state_dict(models[0], full)
        back = opt.master_state_dict(models[0])
        assert all(torch.equal(back[name].full_tensor(), value) for name, value in full.items())
        model = cast_model(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), torch.bfloat16)
        model[1] = nn.Linear(64, 64, dtype=torch.bfloat16)
        AdamW(model.parameters(), module=model).master_state_dict(model)


@pytest.mark.usefixtures("one_rank")
def test_a_dtensor_whose_part_has_another_dtype_is_not_stepped() -> None:
    mesh = init_device_mesh("cpu", (1,))
    params = [nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])) for _ in range(2)]
    params[1].data = params[1].data.bfloat16()
    assert (params[1].dtype, params[1].to_local().dtype) == (torch.bfloat16, torch.float32)
    opt = AdamW(params, plan="fp32_master")
    for p in params:
        p.grad = DTensor.from_local(torch.ones(4, 4, dtype=p.dtype), mesh, [Shard(0)])
    with pytest.raises(RuntimeError, match=r"parameter 1 .* is a DTensor of bfloat16, but its part .* is float32"):
        opt.step()
    assert all(bool((p.to_local() == 1).all()) for p in params) and not opt.state


@pytest.mark.parametrize(
    ("dtype", "keep", "error", "text"),
    [
        (torch.int8, [], TypeError, "floating-point"),
        ("bfloat16", [], TypeError, "floating-point"),
        (torch.float8_e5m2, [], TypeError, "without scales: keep weights in torch.bfloat16.*views="),
        (torch.bfloat16, ["haed"], ValueError, "did you mean 'head'"),
        (torch.bfloat16, "head", TypeError, "list of patterns"),
    ],
)
def test_errors_change_nothing(dtype: object, keep: object, error: type[Exception], text: str) -> None:
    model = Net()
    before = dtypes(model)
    with pytest.raises(error, match=text):
        cast_model(model, dtype, keep)  # type: ignore[arg-type]
    assert dtypes(model) == before


@pytest.mark.parametrize(
    ("keep", "keep_outputs", "text"),
    [
        (["body", "head"], ["haed"], "keep_outputs pattern 'haed' .*did you mean 'head'"),
        (["head"], ["body"], "matches no module that is kept and in no other kept one"),
        (["body"], ["body.2"], "in no other kept one; did you mean 'body'"),
        (["freq", "head.weight"], ["head*"], "matches no module that is kept"),
    ],
)
def test_outputs_that_no_cast_is_made_of_are_refused(keep: list[str], keep_outputs: list[str], text: str) -> None:
    before = dtypes(model := Net())
    with pytest.raises(ValueError, match=text):
        cast_model(model, torch.bfloat16, keep, keep_outputs=keep_outputs)
    assert dtypes(model) == before and not model.head._forward_pre_hooks
