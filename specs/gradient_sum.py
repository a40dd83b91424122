"""A sum of gradients over micro-batches, kept in the format of a plan."""

from optgen.lang import optimizer, state


@optimizer(cite="an accumulator of this repository")
def gradient_sum(p, g, total=state()):
    """The sum of the gradients of several micro-batches; what stands in the weight's place takes it."""
    total = total + g
    p = total
    return p, total
