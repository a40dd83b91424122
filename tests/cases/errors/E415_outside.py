from optgen.driver.build import Request, build

FILES = {"generated/MANIFEST.json": '{"files": {"../../precious.txt": "0"}, "specs": {}}'}


def case():
    build(Request(("lion",), ("fp32",)))
