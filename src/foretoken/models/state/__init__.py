"""Cached state of sequences: paged and slotted KV caches."""
