from optgen.driver.build import Request, build

FILES = {"generated/lion/__init__.py": "mine = True\n"}


def case():
    build(Request(("lion",), ("fp32",)))
