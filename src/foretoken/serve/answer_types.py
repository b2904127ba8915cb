"""Types of answers: OpenAI's objects, with metrics added. They are plain dictionaries at run time."""

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict  # pydantic takes typing's own from Python 3.12 on

from foretoken.core.verdict import Kind

FinishReason = Literal["stop", "length", "tool_calls", Kind]


class CompletionDetails(TypedDict):
    """Tokens of reasoning, and accepted and rejected tokens of the client's own prediction, never of a draft model."""

    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class PromptDetails(TypedDict):
    """``cached_tokens`` are prompt tokens in the prefix cache, known once the answer is complete."""

    cached_tokens: int


class TokenUsage(TypedDict):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: NotRequired[PromptDetails]
    completion_tokens_details: NotRequired[CompletionDetails]


class SpeculativeDecoding(TypedDict):
    """See ``SpeculationRecord.to_dict``."""

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    acceptance_histogram_by_draft_length: dict[str, list[int]]
    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    num_spec_tokens: int
    per_step_accepted: NotRequired[list[int]]
    per_step_drafted: NotRequired[list[int]]


class RequestMetrics(TypedDict):
    """Statistics of the request."""

    speculative_decoding: SpeculativeDecoding


class PromptLogprob(TypedDict):
    """vLLM's: one of the most probable tokens at a place of the prompt, or the prompt's own token."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]  # by token id; the first token has none


class CompletionLogprobs(TypedDict):
    """The legacy format: parallel lists over tokens. The first token of the prompt has no log-probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(TypedDict):
    """One completion. ``stop_reason`` is the stop string or token id that ended it, as in vLLM."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[PromptLogprobs]


class Completion(TypedDict):
    """Answer of POST /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: TokenUsage
    metrics: RequestMetrics


class TopLogprob(TypedDict):
    """One of the most probable tokens."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token of the text, and the most probable tokens at its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    """Log-probabilities of the tokens of the text."""

    content: list[TokenLogprob]
    refusal: None


class CalledFunction(TypedDict):
    """A called function. ``arguments`` is JSON in a string."""

    name: str
    arguments: str


class CalledTool(TypedDict):
    """One call."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(TypedDict):
    """The message that the model wrote: content, calls, or both."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[CalledTool]]


class ChatChoice(TypedDict):
    """One answer."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    token_ids: NotRequired[list[int]]


class ChatCompletion(TypedDict):
    """Answer of POST /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: TokenUsage
    metrics: RequestMetrics
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[PromptLogprobs]


class ResponseObject(TypedDict):
    """Answer of POST /v1/responses. Further fields repeat the request's."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: str
    model: str
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    output: list[dict[str, Any]]
    previous_response_id: str | None
    usage: dict[str, Any] | None
    metrics: NotRequired[RequestMetrics]


class DeletedResponse(TypedDict):
    """Answer of DELETE /v1/responses/{id}."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class DeletedModel(TypedDict):
    """Answer of POST /v1/unload_lora_adapter, as OpenAI's to a deleted model."""

    id: str
    object: Literal["model"]
    deleted: Literal[True]


class ItemList(TypedDict):
    """Answer of GET /v1/responses/{id}/input_items."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class AnthropicUsage(TypedDict):
    """Anthropic's token counts. ``input_tokens`` are those that the prefix cache did not have."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int


class AnthropicMessage(TypedDict):
    """Answer of POST /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None
    usage: AnthropicUsage
    metrics: NotRequired[RequestMetrics]


class TokenCount(TypedDict):
    """Answer of POST /v1/messages/count_tokens."""

    input_tokens: int


class Tokenized(TypedDict):
    """Answer of POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(TypedDict):
    """Answer of POST /detokenize."""

    prompt: str


class Speculation(TypedDict):
    """Methods that ``speculative_method`` may name, the default one, and its drafter in one line."""

    default: str
    methods: list[str]
    drafter: str


class ServedModel(TypedDict):
    """One name under which the model is served, or one of its LoRA adapters, whose parent is the model.

    ``chat`` is whether the model has a chat template that marks the turns of a conversation.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    chat: bool
    speculation: Speculation


class ModelList(TypedDict):
    """Answer of GET /v1/models."""

    object: Literal["list"]
    data: list[ServedModel]


class ErrorObject(TypedDict):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(TypedDict):
    """Answer of every request that fails."""

    error: ErrorObject


class AnthropicErrorObject(TypedDict):
    """Anthropic's error object."""

    type: str
    message: str


class AnthropicError(TypedDict):
    """Answer of every request under /v1/messages that fails."""

    type: Literal["error"]
    error: AnthropicErrorObject
    request_id: str | None


class Health(TypedDict):
    """Answer of GET /health."""

    status: Literal["ok"]


class Version(TypedDict):
    """Answer of GET /version."""

    version: str
