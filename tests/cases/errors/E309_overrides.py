from optgen.formats import Blocked, Plan

listed = Plan("8-bit moments.", overrides=[Blocked()])
