"""The plans of parameters, and how their tensors lie: as rows and blocks, and over several ranks."""
