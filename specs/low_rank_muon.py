"""Muon with a momentum of few bits: a product of rank 8 in fp32, and what it leaves in the bits of the plan."""

from optgen.lang import low_rank
from specs.muon import muon

low_rank_muon = low_rank(
    muon, "momentum_buffer", when="matrix and not adamw", nesterov=True, match_rms_adamw=False
)
