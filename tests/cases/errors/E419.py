from optgen.driver import load, standalone


def case():
    standalone.text(load.find_spec("prodigy"), load.find_plan("int8_split24"))
