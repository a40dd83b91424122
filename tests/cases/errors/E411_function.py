import optgen


def bare(p, g):
    return p - g


def case():
    optgen.compile(bare)
