"""Model families as data: what a config.json asks our runtime to compute."""
