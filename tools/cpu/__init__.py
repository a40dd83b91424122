"""The parts of the CPU benchmark."""
