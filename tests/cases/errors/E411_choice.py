from optgen.driver.cli import _choice


def case():
    _choice("--maths", "fats", ("strict", "fast"))
