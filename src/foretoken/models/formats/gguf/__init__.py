"""GGUF files: one file with metadata, tokenizer and weights, as llama.cpp writes and reads it."""
