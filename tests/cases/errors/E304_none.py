from optgen.formats import Compander
from optgen.formats.proofs import prove

bent = Compander("bent", lambda n: None, lambda y: y)


def case():
    prove(bent)
