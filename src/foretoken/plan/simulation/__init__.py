"""Speculative decoding with draft and target on different workers: a discrete-event simulation."""
