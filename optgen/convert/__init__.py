"""Conversion of checkpoints: between plans, and from and to other packages.

- `packages`: the states of bitsandbytes, torchao and flashoptim as dense tensors. The runtime loads this module when an
  optimizer is given such a state dict (`optgen.runtime.checkpoint.checkpoint.reader`).
- `source`: a checkpoint of any kind, read as dense states and full weights.
- `target`: the same, written under a plan or for torch.optim.
- `rules`: states of AdamW taken over by Muon, SOAP and other rules.
"""
