"""Parsers of reasoning and function calls in generated text, by model family."""
