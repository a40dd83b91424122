"""Triton: device functions that kernels share, the loops around their tiles, and launches."""
