"""The one family of errors that a user can cause; the command line prints them as a single line."""


class ForetokenError(Exception):
    """Base of every error that names what was wrong, what was expected, and what to do."""


class InvalidRequest(ForetokenError, ValueError):
    """A parameter, prompt or configuration that cannot be honoured as given."""


class NoTokenAllowed(InvalidRequest):
    """Raised by a verifier whose verdict reaches a node where no token can come; ``row`` is the node's row."""

    def __init__(self, row: int) -> None:
        super().__init__("cannot draw a token: all are forbidden here, or the model's logits are not finite")
        self.row = row


class ContextLengthExceeded(InvalidRequest):
    """A prompt or a prediction that is longer than the model's context."""


class ModelLoadError(ForetokenError, OSError):
    """A model, tokenizer or checkpoint that cannot be loaded."""


class WriteError(ForetokenError):
    """A folder or file that could not be written; nothing half-written is left."""


class TrainingError(WriteError):
    """A training run that could not continue; whatever was saved before stays whole."""
