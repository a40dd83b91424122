from optgen.formats import Compander
from optgen.verify.bounds import prove

bent = Compander("bent", lambda n: n.foo, lambda y: y)


def case():
    prove(bent)
