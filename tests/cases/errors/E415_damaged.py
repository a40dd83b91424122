from optgen.driver.build import Request, build

FILES = {"generated/MANIFEST.json": '{\n  "files": {\n<<<<<<< HEAD\n'}


def case():
    build(Request(("lion",), ("fp32",)))
