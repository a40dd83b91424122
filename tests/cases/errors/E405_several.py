from optgen.driver.load import find_spec

RULE = """
@optimizer()
def {name}(p, g, *, lr=hyper(1e-3)):
    p = p - lr * g
    return p

"""
FILES = {"rules.py": "from optgen.lang import hyper, optimizer\n" + RULE.format(name="a") + RULE.format(name="b")}


def case():
    find_spec("rules.py")
