"""Buckets, the units of work of a step, and what a step keeps while it runs."""
