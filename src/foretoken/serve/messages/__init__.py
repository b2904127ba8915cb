"""Anthropic's /v1/messages: its request body, its answers and its events."""
