"""Exactness as a claim that can fail: enumerated, tested statistically, and with planted mistakes."""
