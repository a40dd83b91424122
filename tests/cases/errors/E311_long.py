from optgen.formats import Codebook, codebooks

narrow = Codebook(codebooks.dynamic(), 4)
