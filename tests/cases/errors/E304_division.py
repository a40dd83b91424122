from optgen.formats import Compander
from optgen.formats.proofs import prove

bent = Compander("bent", lambda n: 1 / 0, lambda y: y)


def case():
    prove(bent)
