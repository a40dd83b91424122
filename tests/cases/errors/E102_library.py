"""A refusal inside of a package has its place where the author calls it."""

import statistics

from optgen.lang import hyper, optimizer


@optimizer(cite="none")
def meant(p, g, *, lr=hyper(0.1, ge=0)):
    p = p - lr * statistics.fmean([p, g])
    return p
