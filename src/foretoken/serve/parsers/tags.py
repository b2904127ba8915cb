"""Finds tags in text that arrives in pieces."""

from __future__ import annotations


def split_held(text: str, tags: tuple[str, ...]) -> tuple[str, str]:
    """Returns ``text`` without, and only, its longest end that begins one of ``tags``."""
    longest = max(map(len, tags), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        end = text[-length:]
        if any(tag.startswith(end) for tag in tags):
            return text[:-length], end
    return text, ""


def find_tag(text: str, tags: tuple[str, ...]) -> tuple[int, str]:
    """Returns the place of the first of ``tags`` in ``text`` and the tag, the longest of those there; -1 for none."""
    places = [(place, -len(tag), tag) for tag in tags if (place := text.find(tag)) >= 0]
    if not places:
        return -1, ""
    place, _, tag = min(places)
    return place, tag
