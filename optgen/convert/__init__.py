"""Conversion of checkpoints: between plans, and from and to other packages.

- `packages`: the states of bitsandbytes, torchao and flashoptim as dense tensors. The runtime loads this module when an
  optimizer is given such a state dict (`optgen.runtime.checkpoint.checkpoint.reader`).
- `files`: files of any kind, written anew under a plan or for torch.optim.
"""
