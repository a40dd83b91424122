from optgen.formats import LogMinMax, Plan

swapped = Plan("8-bit moments.", signed=LogMinMax())
