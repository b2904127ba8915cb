"""Predicts the speedup of speculative decoding from measured costs and a sample of the user's text."""
