"""Trains hybrids of gated DeltaNet and attention with mixtures of experts, in the layout of Qwen3.5."""
