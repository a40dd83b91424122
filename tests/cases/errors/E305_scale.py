from optgen.formats import Blocked

worded = Blocked(scale="ue8m8")
