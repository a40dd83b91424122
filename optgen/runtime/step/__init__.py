"""One step: the choice of a backend, tables and launches, sums over the model, the fast path."""
