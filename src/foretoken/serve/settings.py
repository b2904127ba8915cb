"""Settings of a server. Imports nothing heavy, because options of ``foretoken serve`` are generated from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from foretoken.core.settings import named
from foretoken.serve.listening import AllowedHosts


@dataclass(frozen=True, kw_only=True)
class AppOptions:
    """Settings that are options of ``foretoken serve``: each field is one (see ``cli.grouped``).

    Args:
        key_file: File of API keys with scopes and limits; see foretoken keys.
        allow_admin: Let clients without a key of the scope admin switch speculation. [on loopback without keys]
        share_cache_across_keys: Let different keys share cached prompts and drafts from each other's outputs.
        tool_call_parser: How the model writes function calls. [what the chat template shows]
        reasoning_parser: How the model writes reasoning; none if it does not. [what the template shows]
        body_timeout: Seconds in which a request's body has to arrive.
        timeout: Seconds that a request may take, including its time in the queue.
        strict: Refuse unknown fields of requests, which are ignored with a warning header otherwise.
    """

    key_file: Path | None = field(default=None, metadata={"option": "--api-key-file"})
    allow_admin: bool = False
    share_cache_across_keys: bool = False
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    body_timeout: float = named("--body-timeout", 60.0, min=0)
    timeout: float = named("--request-timeout", 600.0, min=0)
    strict: bool = False


@dataclass(frozen=True, kw_only=True)
class ServerSettings(AppOptions):
    """Settings of an app. Without ``stored_responses`` and ``stored_bytes`` no response is stored."""

    model_names: Sequence[str] = ("foretoken",)  # answers have the one that the request names, or the first
    lora_modules: Mapping[str, str] = field(default_factory=dict)  # paths of the LoRA adapters at the start, by name
    api_keys: Sequence[str] = ()  # without keys and without a key file, no key is needed
    chat_template: str | None = None  # in place of the tokenizer's
    origins: Sequence[str] = ()  # other origins whose pages may use the API from a browser (CORS)
    hosts: AllowedHosts | None = None  # the ``Host`` headers that are answered; None answers any
    max_body: int = 4 * 2**20  # bytes
    max_n: int = 64  # completions of a prompt, or candidates of best_of
    max_prompts: int = 128  # of one request
    max_logprobs: int = 20  # of a token
    max_concurrency: int = 512  # requests that are answered at once
    stored_responses: int | None = None  # number that /v1/responses may store; None is no limit of their number
    stored_bytes: int | None = None  # bytes that they may take; None is no limit of their size
