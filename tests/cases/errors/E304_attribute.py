from optgen.formats import Compander
from optgen.formats.companders import check

bent = Compander("bent", lambda n: n.foo, lambda y: y)


def case():
    check(bent)
