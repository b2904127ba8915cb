"""Widens checkpoints without changing what they compute."""
