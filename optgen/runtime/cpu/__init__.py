"""C++ kernels on CPU tensors: compiling, loading and calling them."""
