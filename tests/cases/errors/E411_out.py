from optgen.driver.build import Request, build


def case():
    build(Request(("lion",), ("fp32",), out=""))
