from optgen.formats import Plan

named = Plan("It would take the place of a package's own file.", name="__init__")
