"""A function of bits, of a quantity that is computed on the host."""

from optgen.lang import hyper, optimizer
from optgen.lang.values import log2


@optimizer(cite="-")
def slowing(p, g, t, *, lr=hyper(1e-3, ge=0)):
    p = p - lr / (1 + log2(t)) * g
    return p
