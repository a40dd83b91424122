import optgen
from optgen.formats import Blocked, Plan


def case():
    optgen.compile("sgd", plan=Plan("8-bit momentum.", signed=Blocked()))
