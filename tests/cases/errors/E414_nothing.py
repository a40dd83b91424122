from optgen.driver.build import Request, build

FILES = {"README.md": "no specs here"}


def case():
    build(Request())
