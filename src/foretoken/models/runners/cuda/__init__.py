"""The runner for CUDA: layouts of passes, CUDA graphs, and what they launch."""
