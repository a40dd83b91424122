"""Fromage: steps of a fixed length relative to the weight's."""

from optgen.lang import hyper, norm, optimizer, sqrt, where


@optimizer(cite="Bernstein et al. 2020, arXiv:2002.03432, algorithm 1")
def fromage(
    p, g,
    *,
    lr=hyper(1e-2, ge=0),
):
    """The gradient at the length of the weight; the sum is shrunk by what a step at right angles would lengthen it.

    A weight of length 0 takes a plain step; a gradient of length 0 changes nothing.
    """
    p_norm, g_norm = norm(p), norm(g)
    ratio = where((p_norm <= 0) | (g_norm <= 0), 1.0, p_norm / g_norm)  # a NaN stays one
    shrink = where(g_norm <= 0, 1.0, 1 / sqrt(1 + lr * lr))
    p = (p - lr * ratio * g) * shrink
    return p
