from optgen.driver.load import find_spec


def case():
    find_spec("adamv")
