from optgen.formats import Plan

worded = Plan("8-bit moments.", signed="int8")
