from optgen.formats import Plan, floats

small = Plan("Everything in fp32.")
smaller = small.but(sigend=floats.bf16)
