from optgen.formats import Blocked, Plan

uncalled = Plan("8-bit moments.", overrides={"exp_avg": Blocked})
