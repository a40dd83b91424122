from optgen.formats import Codebook

holed = Codebook((-1.0, float("nan"), 1.0), 2)
