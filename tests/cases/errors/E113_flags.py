"""More flags than there is code for."""

from optgen.lang import flag, hyper, optimizer


@optimizer(cite="none")
def switched(p, g, *, lr=hyper(0.1, ge=0), a0=flag(), a1=flag(), a2=flag(), a3=flag(), a4=flag(), a5=flag(),
             a6=flag(), a7=flag(), a8=flag(), a9=flag(), a10=flag()):  # fmt: skip
    if a0 and a1 and a2 and a3 and a4 and a5 and a6 and a7 and a8 and a9 and a10:
        g = 2 * g
    p = p - lr * g
    return p
