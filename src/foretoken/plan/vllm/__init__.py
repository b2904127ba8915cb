"""Plans for vLLM, measured on vLLM itself."""
