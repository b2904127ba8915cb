"""Encoder-decoders of the T5 and BART families: a source is read once, the decoder is a model as any other."""
