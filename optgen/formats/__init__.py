"""Storage formats, master weights and plans: `from optgen.formats import Plan, Blocked, softsign, ...`."""

from optgen.formats import codebooks, companders, floats, masters, scales
from optgen.formats.blocked import Blocked
from optgen.formats.codebook import Codebook
from optgen.formats.companders import linear, softsign
from optgen.formats.factored import Factored
from optgen.formats.floats import Float, bf16, f16, f32
from optgen.formats.format import Field, Format, Master, Noise
from optgen.formats.fp8 import Fp8
from optgen.formats.logminmax import LogMinMax
from optgen.formats.masters import Copy, Ecc8, Native, Split, SplitFp8
from optgen.formats.plan import Plan, Storage
from optgen.formats.rank1 import Rank1
from optgen.formats.scales import Scale, fp16, fp32, ue7m9, ue8m8

__all__ = [
    "Blocked", "Codebook", "Copy", "Ecc8", "Factored", "Field", "Float", "Format", "Fp8",
    "LogMinMax", "Master", "Native", "Noise", "Plan", "Rank1", "Scale", "Split", "SplitFp8", "Storage",
    "bf16", "codebooks", "companders", "f16", "f32", "floats", "fp16", "fp32", "linear", "masters", "scales",
    "softsign", "ue7m9", "ue8m8",
]  # fmt: skip
