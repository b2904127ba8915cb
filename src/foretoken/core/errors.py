"""Errors that a user can cause. The command line prints them as a single line."""

CONTEXT_LENGTH, ENCODER_LENGTH = "the model's context length is", "the encoder reads at most"
_LONGEST = 300  # characters of another library's message


class ForetokenError(Exception):
    """Base of all errors whose message names what is wrong, what was expected, and what to do."""


def reason_of(error: BaseException) -> str:
    """Returns the message of another library's exception, as one line of at most 300 characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _LONGEST else text[: _LONGEST - 4] + " ..."


def allocation_failed(error: BaseException) -> bool:
    """Returns whether an exception of any library says that memory, or a thread's stack, could not be allocated."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or "allocate memory" in text or "start new thread" in text


class InvalidRequest(ForetokenError, ValueError):
    """A parameter, prompt or configuration that is not valid. ``param``: the parameter's name, if one is to blame."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class NoTokenAllowed(InvalidRequest):
    """Raised by a verifier whose verdict reaches a node where no token is possible. ``row`` is the node's row."""

    def __init__(self, row: int) -> None:
        super().__init__("cannot draw a token: all are forbidden here, or the model's logits are not finite")
        self.row = row


class ContextLengthExceeded(InvalidRequest):
    """A prompt or a prediction that exceeds the model's context length."""

    @classmethod
    def of(
        cls, what: str, tokens: int, limit: int, phrase: str = CONTEXT_LENGTH, param: str = "prompt"
    ) -> "ContextLengthExceeded":
        """Returns the error for ``what``, such as "the prompt". phrase: words before the limit."""
        together = ", prompt and output together; shorten it or raise max_model_len"
        return cls(
            f"{what} has {tokens} tokens; {phrase} {limit} tokens"
            f"{together if phrase == CONTEXT_LENGTH else '; shorten it'}",
            param=param,
        )


class ModelLoadError(ForetokenError, OSError):
    """A model, tokenizer or checkpoint that cannot be loaded."""


class WriteError(ForetokenError):
    """A folder or file that could not be written. No partial file is left."""


class TrainingError(WriteError):
    """A training run that could not continue. Earlier checkpoints stay intact."""
