"""The runner for CUDA: layouts of passes, CUDA graphs, and the paged KV cache."""
