from optgen.formats import LogMax

worded = LogMax(octaves="2")
