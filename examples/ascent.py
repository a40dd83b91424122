"""The first step of SAM as a rule: uphill by rho over the gradient's norm, of all parameters together.

    Ascent = optgen.compile("examples/ascent.py", plan="bf16_sr")
    sam = optgen.SAM(opt, ascent=Ascent(model.parameters(), rho=0.05))
"""

from optgen.lang import flag, hyper, model_norm, optimizer


@optimizer(cite="Foret et al. 2021, arXiv:2010.01412; adaptive: Kwon et al. 2021, arXiv:2102.11600", name="Ascent")
def ascent(p, g, *, rho=hyper(0.05, ge=0), adaptive=flag(False)):
    """Under bf16_sr the moved weights of 16 bits are right in the mean, where nearest rounding leaves most of them."""
    if adaptive:
        p = p + rho * p * p * g / (model_norm(p * g) + 1e-12)
    else:
        p = p + rho * g / (model_norm(g) + 1e-12)
    return p
