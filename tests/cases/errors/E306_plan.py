from optgen.formats import Plan, floats

misspelt = Plan("bf16 moments.", sgned=floats.bf16)
