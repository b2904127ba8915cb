"""Runners compute forward passes: compiled kernels, torch operators, CUDA graphs, transformers modules."""
