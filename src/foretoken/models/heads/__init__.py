"""Draft heads on a target's hidden states: their checkpoints in the formats of other engines, and their networks.

Readers raise ModelLoadError for a checkpoint that is incomplete, inconsistent, of another kind or for another target.
"""
