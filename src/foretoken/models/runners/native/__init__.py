"""The compiled runtime: one call computes a whole pass (see csrc/decoder.cpp)."""
