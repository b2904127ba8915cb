"""Building and caching of compiled kernels, and the sampling kernels (csrc/sampling.cpp)."""
