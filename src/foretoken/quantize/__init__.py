"""Writes quantized checkpoints: compressed-tensors folders and GGUF files."""

from foretoken.quantize.run import QuantizedCheckpoint, quantize_checkpoint

__all__ = ["QuantizedCheckpoint", "quantize_checkpoint"]
