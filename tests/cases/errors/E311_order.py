from optgen.formats import Codebook

thirds = Codebook((-1.0, 0.0, 0.66, 0.33, 1.0), 3)
