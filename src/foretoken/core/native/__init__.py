"""Compiled code: how it is built and kept, and the laws' own kernels (see csrc/laws.cpp)."""
