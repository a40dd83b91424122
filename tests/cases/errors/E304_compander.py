from optgen.formats import Compander
from optgen.formats.proofs import prove

halved = Compander("halved", lambda x: x * x, lambda y: y / 2)


def case():
    prove(halved)
