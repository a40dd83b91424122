from optgen.driver.build import Request, build

FILES = {"generated": "a file, not a folder"}


def case():
    build(Request(("adamw",)))
