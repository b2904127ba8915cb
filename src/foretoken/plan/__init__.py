"""Predicts the speedup of speculative decoding from formulas, measured costs and a sample of the user's text."""
