from optgen.formats import Compander
from optgen.formats.companders import check

halved = Compander("halved", lambda x: x * x, lambda y: y / 2)


def case():
    check(halved)
