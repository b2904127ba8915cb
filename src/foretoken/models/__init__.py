"""Models: the network's side of speculative decoding, from checkpoint to logits.

Imports run from the last of these to the first: ``base`` (the contract), ``families`` (architectures as data),
``formats`` (checkpoints) and ``state`` (KV caches), ``runners`` (forward passes), ``decoder``, then the other whole
models ``seq2seq``, ``hf`` (transformers' modules), ``early_exit`` and draft ``heads``, and ``loading``.
"""
