from optgen.formats import Plan, floats

swapped = Plan("bf16 weights.", master=floats.bf16)
