"""The states of parameters, the low bits of their weights, and the memory that both take."""
