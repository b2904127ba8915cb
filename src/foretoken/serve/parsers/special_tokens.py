"""Drops special tokens from text that shows them for a parser's sake."""

from __future__ import annotations

import re
from collections.abc import Sequence

from foretoken.serve.output import OutputEvent, OutputParser


class WithoutTokens:
    """Hands the text to another parser without some special tokens, each of which comes in one piece.

    Args:
        dropped: The texts of the tokens.
        parser: Reads the rest.
    """

    def __init__(self, dropped: Sequence[str], parser: OutputParser) -> None:
        self._dropped = re.compile("|".join(re.escape(text) for text in sorted(dropped, key=len, reverse=True)))
        self._parser = parser

    @property
    def calls(self) -> int:
        """See ``OutputParser``."""
        return self._parser.calls

    @property
    def cut(self) -> bool:
        """See ``OutputParser``."""
        return self._parser.cut

    @property
    def reasoning_tokens(self) -> int:
        """See ``OutputParser``."""
        return self._parser.reasoning_tokens

    def push(self, text: str, tokens: Sequence[int] = ()) -> list[OutputEvent]:
        """See ``OutputParser``."""
        return self._parser.push(self._dropped.sub("", text), tokens)

    def finish(self) -> list[OutputEvent]:
        """See ``OutputParser``."""
        return self._parser.finish()
