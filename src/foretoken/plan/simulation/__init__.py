"""Speculative decoding with draft and target on different workers: formulas and a discrete-event simulation."""
