"""Causal models of transformers behind the model contract: their own modules, checked on loading."""
