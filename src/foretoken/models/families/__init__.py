"""Model families as data: what a config.json asks our runtime to compute.

Functions raise ModelLoadError for a field of a known architecture that is missing or wrong.
"""
