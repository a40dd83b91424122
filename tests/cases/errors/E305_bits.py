from optgen.formats import Blocked

five = Blocked(5, 64)
