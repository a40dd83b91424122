from optgen.driver.build import Request, build


def case():
    build(Request(out="o" * 300))
