"""Draft heads on a target's hidden states: their checkpoints in the formats of other engines, and their networks."""
