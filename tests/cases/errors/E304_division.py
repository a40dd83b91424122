from optgen.formats import Compander
from optgen.formats.companders import check

bent = Compander("bent", lambda n: 1 / 0, lambda y: y)


def case():
    check(bent)
