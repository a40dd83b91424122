from optgen.formats import Blocked

nine = Blocked(9, 64)
