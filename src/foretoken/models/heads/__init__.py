"""Heads on a target's hidden states: their files in every dialect of the field, and their nets at inference."""
