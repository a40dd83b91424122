"""What tools/gpu_check.py is made of; nothing here imports the compiler, only torch, Triton and the runtime."""
