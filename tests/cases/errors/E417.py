from optgen.driver.checkpoints import verify


def case():
    verify("run.pt")
