from optgen.formats import Codebook

wide = Codebook((-2.0, 0.0, 2.0), 2)
