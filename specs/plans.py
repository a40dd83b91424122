"""The plans that every optimizer can be built with.

Bytes per parameter in the texts are AdamW's with bf16 parameters (fp32 ones where the plan is for them): weight
and moments, without the gradient.  They are checked against what is derived from the formats.

Moments are rounded stochastically unless a rule's recurrence asks for nearest (`auto`); a plan that rounds slow
averages to nearest says in `discouraged` why it exists all the same: who uses it is warned.
"""

from optgen.formats import (
    Blocked,
    Codebook,
    Copy,
    Ecc8,
    Factored,
    Fp8,
    LogMinMax,
    Native,
    Plan,
    Rank1,
    Split,
    codebooks,
    floats,
    linear,
    scales,
    softsign,
)

fp32 = Plan("Everything in fp32: 12 bytes per fp32 parameter.", small_numel=0)

bf16 = Plan(
    "bf16 weight and moments, all rounded to nearest: 6 bytes per parameter.",
    signed=floats.bf16,
    nonneg=floats.bf16,
    small_numel=0,
    discouraged="it is what plain bf16 training does; kept as the baseline that bf16_sr is compared with",
)

bf16_sr = Plan(
    "bf16 weight and moments, all rounded stochastically: 6 bytes per parameter.",
    master=Native("stochastic"),
    signed=floats.bf16_auto,
    nonneg=floats.bf16_auto,
    small_numel=0,
)

fp32_master = Plan(
    "bf16 weight with an fp32 copy, fp32 moments: 14 bytes per parameter.",
    master=Copy(),
    small_numel=0,
)

split32 = Plan(
    "bf16 weight and its 16 missing bits, bf16 moments rounded stochastically: 8 bytes per parameter.",
    master=Split(16),
    signed=floats.bf16_auto,
    nonneg=floats.bf16_auto,
    small_numel=0,
)

int8_split24 = Plan(
    "bf16 weight and 8 more bits, 8-bit moments, all rounded stochastically: 5.0625 bytes per parameter.",
    master=Split(8, "stochastic"),
    signed=Blocked(8, 64, softsign(1), scales.ue8m8, relative=True),
    nonneg=LogMinMax(8, 64),
    matrices=8,
)

int6_split24 = Plan(
    "bf16 weight and 8 more bits, 6-bit moments, all rounded stochastically: 4.5625 bytes per parameter.",
    master=Split(8, "stochastic"),
    signed=Blocked(6, 64, softsign(1), scales.ue8m8, relative=True),
    nonneg=LogMinMax(6, 64),
    matrices=8,
)

int5_split24 = Plan(
    "bf16 weight and 8 more bits, 5-bit moments, all rounded stochastically: 4.3125 bytes per parameter.",
    master=Split(8, "stochastic"),
    signed=Blocked(5, 64, softsign(0.5), scales.ue8m8, relative=True),
    nonneg=LogMinMax(5, 64),
    matrices=8,
)

int4_split24 = Plan(
    "bf16 weight and 8 more bits, 4-bit moments, all rounded stochastically: 4.0625 bytes per parameter.",
    master=Split(8, "stochastic"),
    signed=Blocked(4, 64, softsign(0.5), scales.ue8m8, relative=True),
    nonneg=LogMinMax(4, 64),
    matrices=8,
)

int8 = Plan(
    "The 8-bit moments of int8_split24 for fp32 weights: 6.0625 bytes per fp32 parameter.",
    signed=int8_split24.signed,
    nonneg=int8_split24.nonneg,
    matrices=8,
)

int8_rn_split24 = Plan(
    "bf16 weight and 8 more bits, 8-bit moments, all rounded to nearest: 5.0625 bytes per parameter.",
    master=Split(8, "nearest"),
    signed=Blocked(8, 64, softsign(1), scales.ue8m8, rounding="nearest"),
    nonneg=Blocked(8, 64, linear, scales.ue7m9, signed=False, rounding="nearest"),
    matrices=8,
    discouraged="draws no random bits, the cheapest kernel there is; for runs short enough to live with stuck averages",
)

flashoptim = Plan(
    "FlashOptim's storage, number by number: 5.125 bytes per parameter.",
    master=Ecc8(),
    signed=Blocked(8, 32, softsign(1), scales.fp16, rounding="nearest"),
    nonneg=Blocked(8, 32, linear, scales.fp16, signed=False, rounding="nearest"),
    small_numel=0,
    discouraged="its checkpoints and results can be compared only by its own numbers",
)

bnb8 = Plan(
    "bitsandbytes' 8-bit states, number by number: 4.03125 bytes per parameter.",
    signed=Codebook(codebooks.dynamic(), 8, 256, ties="down"),
    nonneg=Codebook(codebooks.dynamic(signed=False), 8, 256, ties="down"),
    discouraged="its checkpoints and results can be compared only by its own numbers",
)

torchao8 = Plan(
    "torchao's 8-bit states, number by number: 4.03125 bytes per parameter.",
    signed=Codebook(codebooks.dynamic(), 8, 256, scales.FloatScale(least=1e-12)),
    nonneg=Codebook(codebooks.dynamic(signed=False), 8, 256, scales.FloatScale(least=1e-12)),
    discouraged="its checkpoints and results can be compared only by its own numbers",
)

torchao4 = Plan(
    "torchao's 4-bit states, number by number: 3.0625 bytes per parameter.",
    signed=Codebook(codebooks.dynamic(bits=4), 4, 128, scales.FloatScale(least=1e-12)),
    nonneg=Codebook(codebooks.linear_nozero(4), 4, 128, scales.FloatScale(least=1e-12)),
    discouraged="its checkpoints and results can be compared only by its own numbers",
)

torchao_fp8 = Plan(
    "torchao's states of 8-bit floats, number by number: 4.03125 bytes per parameter.",
    signed=Fp8("e4m3", 256, scales.FloatScale(least=1e-12 / 448)),
    nonneg=Fp8("e4m3", 256, scales.FloatScale(least=1e-12 / 448)),
    discouraged="its checkpoints and results can be compared only by its own numbers",
)

lpmm4 = Plan(
    "The 4-bit paper's states, number by number: 3.03125 bytes per parameter.",
    signed=Codebook(codebooks.dynamic(bits=4), 4, 128, ties="down"),
    nonneg=Rank1(4, vectors=128),
    discouraged="its results can be compared only by its own numbers",
)

lpmm4_factor = Plan(
    "The 4-bit paper's first moment and a factored second one, stored as its code does: 2.53125 bytes per parameter.",
    signed=Codebook(codebooks.dynamic(bits=4), 4, 128, ties="down"),
    nonneg=Factored(vectors=Rank1(4, vectors=128).of_vectors()),
    discouraged="its results can be compared only by its own numbers",
)

int4_factored_split24 = Plan(
    "bf16 weight and 8 more bits, 4-bit first moment, stochastic, factored second one: 3.53125 bytes per parameter.",
    master=Split(8, "stochastic"),
    signed=Blocked(4, 64, softsign(0.5), scales.ue8m8, relative=True),
    nonneg=Factored(vectors=LogMinMax(4, 64)),
    matrices=8,
)

int5_factored_split24 = Plan(
    "bf16 weight and 8 more bits, 5-bit first moment, stochastic, factored second one: 3.65625 bytes per parameter.",
    master=Split(8, "stochastic"),
    signed=Blocked(5, 64, softsign(0.5), scales.ue8m8, relative=True),
    nonneg=Factored(vectors=LogMinMax(5, 64)),
    matrices=8,
)
