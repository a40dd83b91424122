import torch

from optgen.driver.checkpoints import convert

FILES = {"ours.txt": ""}


def case():
    torch.save({"state": {}, "param_groups": [{"params": [], "lr": 0.1}]}, "run.pt")
    convert("run.pt", "out.pt", to="int8_split24")
