from optgen.driver.build import Request, build

RULE = """
from optgen.lang import hyper, norm, optimizer

@optimizer()
def unit(p, g, *, lr=hyper(1e-3), eps=hyper(1e-8)):
    p = p - lr * g / (norm(g) + eps)
    return p
"""
FILES = {"specs/unit.py": RULE}


def case():
    build(Request(("unit",), ("fp32",)))
