from optgen.formats import codebooks

wide = codebooks.dynamic(bits=16)
