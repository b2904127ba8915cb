"""Encoder-decoders of the T5 and BART families: the encoder runs once, the decoder is a model like any other."""
