"""One file per optimizer, and plans.py: how states are stored."""
