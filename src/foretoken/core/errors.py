"""Errors that a user can cause. The command line prints them as a single line."""


class ForetokenError(Exception):
    """Base of all errors whose message names what is wrong, what was expected, and what to do."""


class InvalidRequest(ForetokenError, ValueError):
    """A parameter, prompt or configuration that is not valid."""


class NoTokenAllowed(InvalidRequest):
    """Raised by a verifier whose verdict reaches a node where no token is possible. ``row`` is the node's row."""

    def __init__(self, row: int) -> None:
        super().__init__("cannot draw a token: all are forbidden here, or the model's logits are not finite")
        self.row = row


class ContextLengthExceeded(InvalidRequest):
    """A prompt or a prediction that exceeds the model's context length."""


class ModelLoadError(ForetokenError, OSError):
    """A model, tokenizer or checkpoint that cannot be loaded."""


class WriteError(ForetokenError):
    """A folder or file that could not be written. No partial file is left."""


class TrainingError(WriteError):
    """A training run that could not continue. Earlier checkpoints stay intact."""
