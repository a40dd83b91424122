"""Lookahead around AdamW: slow weights that follow every few steps."""

from optgen.lang import lookahead
from specs.adamw import adamw

lookahead_adamw = lookahead(adamw)
