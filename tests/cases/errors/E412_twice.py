from optgen.driver.build import Request, build

RULE = """
from optgen.lang import hyper, optimizer

@optimizer(name="Plain")
def {name}(p, g, *, lr=hyper(1e-3)):
    p = p - lr * g
    return p
"""
FILES = {f"specs/{name}.py": RULE.format(name=name) for name in ("first", "second")}


def case():
    build(Request(("first", "second"), ("fp32",)))
