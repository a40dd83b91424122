from optgen.formats import Fp8

narrow = Fp8("e3m4")
