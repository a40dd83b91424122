from optgen.formats import Plan

named = Plan("Elsewhere.", name="../elsewhere")
