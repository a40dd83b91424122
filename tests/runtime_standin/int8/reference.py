import functools
import math

import torch

from .. import records as rule

BLOCK = 8


def blocks(x):
    """(rows, blocks, 8) of a tensor, zeros behind the last column."""
    rows = x.shape[0] if x.ndim >= 2 else 1
    x = x.reshape(rows, -1)
    return torch.nn.functional.pad(x, (0, -x.shape[1] % BLOCK)).view(rows, -1, BLOCK)


def unblock(x, shape):
    rows = shape[0] if len(shape) >= 2 else 1
    return x.reshape(rows, -1)[:, : math.prod(shape) // rows].reshape(shape)


def quantize(m, noise=0.5):
    """(codes biased by 128, scale per block); `noise` in [0, 1) is added before rounding down."""
    x = blocks(m)
    scale = x.abs().amax(-1, keepdim=True) / 127
    code = torch.where(scale > 0, x / scale, x)
    code = (unblock(code, m.shape) + noise).floor().clamp(-127, 127)
    return (code + 128).to(torch.uint8), scale.squeeze(-1)


def dequantize(code, scale):
    return unblock(blocks(code.float() - 128) * scale.unsqueeze(-1), code.shape)


def noise(shape, step_key, stream_key):
    generator = torch.Generator().manual_seed(step_key * 31 + stream_key & 0xFFFFFFFF)
    return torch.rand(shape, generator=generator)


def read_weight(dtype, p, low):
    """The fp32 weight, in a tensor of its own."""
    if dtype == "float32":
        return p.clone()
    if dtype == "float16":
        return low[0].clone()
    return ((p.view(torch.int16).int() << 16) + low[0].int()).view(torch.float32)


def write_weight(dtype, w):
    """(p, what stands beside it)."""
    if dtype == "float32":
        return w, []
    if dtype == "float16":
        return w.half(), [w]
    bits = w.view(torch.int32)
    high = (bits + 0x8000) >> 16
    return high.to(torch.int16).view(torch.bfloat16), [(bits - (high << 16)).to(torch.int16)]


def step(dtype, small, p, g, *rest):
    *fields, step_key, stream_key = rest
    fields, scalars = fields[:-8], fields[-8:]
    low, states = (fields[:0], fields) if dtype == "float32" else (fields[:1], fields[1:])
    w = read_weight(dtype, p, low)
    m = states[0] if small else dequantize(states[0], states[1])
    rule.update(w, g.float(), m, states[-1], None, *scalars)
    if not small:
        for field, new in zip(states, quantize(m, noise(m.shape, step_key, stream_key)), strict=False):
            field.copy_(new)
    for field, new in zip([p, *low], [(q := write_weight(dtype, w))[0], *q[1]], strict=True):
        field.copy_(new)


def decode(dtype, small, p, *fields):
    low, states = (fields[:0], fields) if dtype == "float32" else (fields[:1], fields[1:])
    m = states[0] if small else dequantize(states[0], states[1])
    return {"p": read_weight(dtype, p, low), "exp_avg": m, "exp_avg_sq": states[-1]}


def encode(dtype, small, values):
    p, low = write_weight(dtype, values["p"])
    made = {"p": p, "exp_avg_sq": values["exp_avg_sq"]}
    made |= {"float32": {}, "bfloat16": {"weight_low": low and low[0]}, "float16": {"weight_master": low and low[0]}}[
        dtype
    ]
    if small:
        return {**made, "exp_avg": values["exp_avg"]}
    code, scale = quantize(values["exp_avg"])
    return {**made, "exp_avg": code, "exp_avg_scale": scale}


for _dtype in ("float32", "bfloat16", "float16"):
    for _small in (False, True):
        _name = f"adamw_{_dtype}_small" if _small else f"adamw_{_dtype}"
        globals()[_name] = functools.partial(step, _dtype, _small)
        globals()[f"{_name}_decode"] = functools.partial(decode, _dtype, _small)
        globals()[f"{_name}_encode"] = functools.partial(encode, _dtype, _small)
