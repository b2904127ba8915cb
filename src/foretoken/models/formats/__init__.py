"""Checkpoint formats: reads configurations, tensors, tokenizers and quantized weights.

Readers raise ModelLoadError for a file, field or tensor that is missing, damaged, of the wrong shape or not supported.
"""
