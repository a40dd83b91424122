TEXT = """
from optgen.lang import hyper, optimizer

@optimizer()
def typed_in(p, g, *, lr=hyper(1e-3)):
    p = p - lr * g
    return p
"""


def case():
    exec(compile(TEXT, "<typed in>", "exec"), {"__name__": "typed_in"})
