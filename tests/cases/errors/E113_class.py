from optgen.lang import optimizer


@optimizer(cite="nobody")
class Rule:
    """Not a function."""
