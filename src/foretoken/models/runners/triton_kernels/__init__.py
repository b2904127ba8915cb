"""Triton kernels for CUDA whose rows do not depend on what shares the pass."""
