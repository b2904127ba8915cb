"""Checkpoint formats: reads configurations, tensors, tokenizers and quantized weights."""
