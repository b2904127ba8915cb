"""Fields of other servers and of other APIs that would change the text and have no equivalent here.

They are refused by name, because ignoring them would return another text than the client asked for. Fields with an
equivalent are in the schemas.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Refusal:
    """The refusal of a field."""

    reason: str  # or the field to use
    off: tuple[Any, ...] = (False,)  # accepted values, beside null, which change nothing; False includes 0

    def accepts(self, value: Any) -> bool:
        """Returns whether the value changes nothing."""
        return value is None or value in self.off


Refusals = Mapping[str, Refusal]

_NO_SAMPLER = "this sampler does not exist here; temperature, top_p, top_k and min_p do"
_NO_PENALTY = "this penalty does not exist here; presence_, frequency_ and repetition_penalty do"
_NO_TOOLS = "no tools are run on this server"
_ONE_BY_ONE = "tokens are sampled one by one"

# On all endpoints that generate.
SAMPLING: Refusals = {
    # llama.cpp
    "adaptive_target": Refusal(_NO_SAMPLER, (-1, False)),
    "dry_multiplier": Refusal(_NO_PENALTY),
    "dynatemp_range": Refusal(_NO_SAMPLER),
    "lora": Refusal("name the adapter as model", ([],)),
    "min_keep": Refusal(_NO_SAMPLER),
    "mirostat": Refusal(_NO_SAMPLER),
    "n_indent": Refusal("indentation is not enforced; use grammar"),
    "n_predict": Refusal("use max_tokens (max_output_tokens in responses)", (-1,)),
    "samplers": Refusal("their order is fixed: penalties, temperature, min_p, top_k, top_p"),
    "t_max_predict_ms": Refusal("a request has no time limit of its own; use max_tokens"),
    "top_n_sigma": Refusal(_NO_SAMPLER, (-1, False)),
    "typical_p": Refusal(_NO_SAMPLER, (1,)),
    "xtc_probability": Refusal(_NO_SAMPLER),
    # vLLM
    "guided_whitespace_pattern": Refusal("JSON has the whitespace of json.dumps, or any: see structured_outputs"),
    "logits_processors": Refusal("no code of clients is run", ([],)),
    "structural_tag": Refusal("use structured_outputs, or tools"),
    "thinking_token_budget": Refusal("reasoning has no budget of tokens here"),
    "truncation_side": Refusal("truncate_prompt_tokens keeps the last tokens", ("left",)),
    "use_beam_search": Refusal(f"{_ONE_BY_ONE}; leave it out"),
    # SGLang
    "custom_logit_processor": Refusal("no code of clients is run"),
    "input_ids": Refusal("token ids are the prompt of /v1/completions"),
    "lora_path": Refusal("name the adapter as model"),
    "separate_reasoning": Refusal("start the server with --reasoning-parser none", (True,)),
    "session_params": Refusal("send the whole conversation; the prefix cache finds what is known of it"),
    "stop_regex": Refusal("use stop, or regex"),
    # DashScope, DeepSeek, text-generation-inference and others
    "enable_thinking": Refusal("put it into chat_template_kwargs", ()),
    "max_new_tokens": Refusal("use max_tokens (max_output_tokens in responses)"),
    "no_repeat_ngram_size": Refusal(_NO_PENALTY),
    "tfs_z": Refusal(_NO_SAMPLER, (1,)),
    "top_a": Refusal(_NO_SAMPLER),
    "typical": Refusal(_NO_SAMPLER, (1,)),
}

STRUCTURED_OUTPUTS: Refusals = {
    "disable_additional_properties": Refusal("say it in the schema, with additionalProperties: false"),
    "structural_tag": Refusal("use tools"),
    "whitespace_pattern": Refusal("use whitespace, which is true for any and false for that of json.dumps"),
}
COMPLETIONS: Refusals = {
    **SAMPLING,
    "max_completion_tokens": Refusal("use max_tokens"),
    "messages": Refusal("use /v1/chat/completions"),
    "prompt_embeds": Refusal("send the prompt as text or as token ids"),
    "tools": Refusal("use /v1/chat/completions", ([],)),
}
CHAT: Refusals = {
    **SAMPLING,
    "audio": Refusal("only text comes out"),
    "best_of": Refusal("use n, or best_of on /v1/completions", (1,)),
    "chat_template": Refusal("start the server with --chat-template"),
    "documents": Refusal("put them into a message"),
    "echo": Refusal("the answer is the new message alone"),
    "function_call": Refusal("it was replaced by tool_choice"),
    "functions": Refusal("it was replaced by tools"),
    "max_output_tokens": Refusal("use max_completion_tokens"),
    "prompt": Refusal("use messages, or /v1/completions"),
    "reasoning": Refusal("use reasoning_effort"),
    "suffix": Refusal("use /v1/completions", ("",)),
    "thinking": Refusal("put enable_thinking into chat_template_kwargs"),
    "web_search_options": Refusal("the server does not search; put what was found into a message"),
}
RESPONSES: Refusals = {
    **SAMPLING,
    "background": Refusal("responses are written while the client waits; use stream, or leave it out"),
    "context_management": Refusal("nothing is compacted; send fewer items"),
    "conversation": Refusal("use previous_response_id"),
    "max_completion_tokens": Refusal("use max_output_tokens"),
    "max_tokens": Refusal("use max_output_tokens"),
    "max_tool_calls": Refusal(_NO_TOOLS),
    "messages": Refusal("use input"),
    "n": Refusal("a response has one output", (1,)),
    "prompt": Refusal("prompt templates are OpenAI's; put the text into instructions or input"),
    "reasoning_effort": Refusal("use reasoning.effort"),
    "response_format": Refusal("use text.format"),
    "stop": Refusal("use stop_token_ids, or /v1/chat/completions", ("", [])),
    "verbosity": Refusal("use text.verbosity"),
}
MESSAGES: Refusals = {
    **SAMPLING,
    "container": Refusal(_NO_TOOLS),
    "max_completion_tokens": Refusal("use max_tokens"),
    "mcp_servers": Refusal(_NO_TOOLS),
    "n": Refusal("there is one answer", (1,)),
    "reasoning_effort": Refusal("use output_config.effort"),
    "response_format": Refusal("use output_config.format"),
    "stop": Refusal("use stop_sequences", ("", [])),
}
TOKENIZE: Refusals = {"chat_template": Refusal("start the server with --chat-template")}
