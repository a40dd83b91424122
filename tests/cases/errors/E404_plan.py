from optgen.driver.load import find_plan


def case():
    find_plan("int8_splt24")
