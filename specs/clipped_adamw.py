"""AdamW with gradients clipped by their norm over all parameters."""

from optgen.lang import clipped
from specs.adamw import adamw

clipped_adamw = clipped(adamw)
