"""Modules of transformers: reading them from checkpoints, and checks after loading.

The last check: a module's logits in our batches equal its logits alone.

Without it, a module that builds its own masks or positions would give wrong text without an error. The check runs a
ragged batch with draft trees for two steps, and compares every logit with a plain pass of the module over that path.

It runs twice. A tiny random copy (``tiny_random.py``) runs it with texts longer than every attention window and every
length at which rotary factors change. The module itself runs it with a few tokens, in its precision and on its
device. So the class and its attention layout are checked at all lengths, the weights at short lengths only.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretoken.core.draft import Draft
from foretoken.core.errors import ModelLoadError
from foretoken.models.base import Handle
from foretoken.models.decoder import RunnerModel
from foretoken.models.formats.checkpoint import open_weights
from foretoken.models.formats.memory import check_fits
from foretoken.models.formats.weight_files import is_finite
from foretoken.models.hf.runner import HFRunner
from foretoken.models.hf.tiny_random import boundaries, tiny_random

MAX_GROWTH = 2  # parameters of the module per element of the checkpoint; conversions on loading change the number
SLACK = 2**16  # parameters by which small modules may exceed that
MAX_REASON = 300  # characters
_ATTENTION = ("eager", "sdpa")
_LAYER_TYPES = ("full_attention", "sliding_attention")


def read_module(path: Path, dtype: torch.dtype, **options: Any) -> Any:
    """Loads the module of a safetensors checkpoint.

    Raises ModelLoadError if the checkpoint is incomplete or malformed.
    options: further arguments of transformers' ``from_pretrained``.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        check_size(config, path)
        softcap = getattr(config.get_text_config(), "attn_logit_softcapping", None)
        module, info = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
            attn_implementation="eager" if softcap else None,
            output_loading_info=True,
            **options,
        )
    except ModelLoadError:
        raise
    except Exception as error:  # a malformed configuration fails anywhere in transformers
        raise ModelLoadError(f"transformers cannot load the model in {path}: {one_line(error)}") from error
    if missing := sorted(info["missing_keys"]):
        raise ModelLoadError(
            f"the checkpoint in {path} lacks {len(missing)} tensor(s), first {missing[0]!r}; is it complete?"
        )
    check_parameters(module, path)
    return module


def check_size(config: Any, path: Path) -> None:
    """Builds the module without memory, and compares its size with the checkpoint's.

    Raises ModelLoadError if the module is much larger than its tensors, or its tables do not fit into memory.
    config: the configuration as transformers reads it.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    built = sum(parameter.numel() for parameter in module.parameters())
    stored = sum(math.prod(shape) for shape in open_weights(path).shapes.values())
    packed = getattr(config, "quantization_config", None) is not None
    if not packed and built > MAX_GROWTH * stored + SLACK:
        raise ModelLoadError(
            f"config.json in {path} describes a model of {built:,} parameters, but the checkpoint holds {stored:,}; "
            "do they belong together?"
        )
    check_fits(sum(buffer.nbytes for buffer in module.buffers()), torch.device("cpu"), str(path))


def check_parameters(module: Any, path: Path) -> None:
    """Checks the loaded parameters; a rank checks its part.

    Raises:
        ModelLoadError: a parameter holds NaN or infinity; in float16, possibly only after the conversion.
    """
    for name, parameter in module.named_parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        if not is_finite(local.detach()):
            half = local.dtype == torch.float16
            raise ModelLoadError(
                f"the tensor {name!r} of {path} holds numbers that are NaN or infinite{' in float16' * half}; download "
                f"or save the checkpoint again{', or use bfloat16 or float32' * half}"
            )


def check_supported(module: Any, config: Any) -> None:
    """Raises ModelLoadError for a module that is known not to work, with the reason.

    config: the configuration of its language model.
    """
    name = type(module).__name__
    if getattr(module.config, "is_encoder_decoder", False):
        raise ModelLoadError(f"{name} is an encoder-decoder; a decoder-only causal language model is needed")
    if getattr(module, "_is_stateful", False):
        raise ModelLoadError(f"{name} keeps a state that cannot be rewound, so drafts cannot be taken back")
    if unknown := sorted(set(getattr(config, "layer_types", None) or ()) - set(_LAYER_TYPES)):
        raise ModelLoadError(
            f"{name} has {', '.join(unknown)} layers, and only {' and '.join(_LAYER_TYPES)} layers are supported; "
            "run it with transformers alone, or take another model"
        )
    if getattr(config, "alibi", False) or config.model_type in ("bloom", "mpt"):
        raise ModelLoadError(
            f"{name} uses ALiBi, whose biases transformers computes from row numbers and not from positions; "
            "models with rotary or learned positions work"
        )
    used = getattr(config, "_attn_implementation", None) or "eager"
    if used not in _ATTENTION:
        raise ModelLoadError(
            f"{name} has attn_implementation={used!r}, which takes no tree mask; load it with 'sdpa' or 'eager'"
        )


def one_line(error: BaseException) -> str:
    """Returns an error's message in one line: its lines up to the first that does not end with a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    count = next((number for number, line in enumerate(lines, 1) if not line.endswith(":")), len(lines))
    text = " ".join(lines[:count])[:MAX_REASON] or type(error).__name__
    return text if text.isprintable() else ascii(text)


_LONG = 40  # tokens: beyond every boundary of a copy, and long enough to be prefilled by itself
_RAGGED = (_LONG, 5, 2)  # the second text crosses the boundaries while it is decoded
_SHORT = (3, 1)
_LONGEST = 1024  # tokens of the longest text that a module without a copy is checked with
_TREE = (-1, -1, 0, 1)
_STAGES: tuple[tuple[tuple[int, ...], bool, str], ...] = (
    ((_LONG,), False, "continuing from its cache gives other logits than its whole text"),
    (
        _RAGGED,
        False,
        "its attention or positions count the padded rows of a batch, so that a sequence's output would depend on its "
        "neighbours",
    ),
    (_RAGGED, True, "its attention or positions do not follow a draft tree"),
)
_ADVICE = "run it with transformers alone, or take another model: Llama, Mistral, Qwen, Gemma, Phi and most others work"


def _runner(model: RunnerModel) -> HFRunner:
    assert isinstance(model.runner, HFRunner)
    return model.runner


def check(model: RunnerModel, max_length: int, wrap: Callable[[Any], RunnerModel]) -> None:
    """Raises ModelLoadError, with the reason, for a module whose logits in a batch differ from its logits alone.

    Args:
        max_length: length of the longest sequence that the model will serve.
        wrap: wraps a copy of the module without checking it.
    """
    module = _runner(model).module
    name = type(module).__name__
    crossed = boundaries(module.config.get_text_config(), max_length)
    copy = tiny_random(module, crossed)
    if copy is not None:
        reason = _failure(wrap(copy))
        if reason and crossed and not _failure(wrap(tiny_random(module, {}))):
            raise ModelLoadError(_beyond(name, crossed, reason))
        if reason:
            raise ModelLoadError(f"{name} cannot be served: {reason}; {_ADVICE}")
        lengths, steps = _SHORT, 1
    else:
        lengths, steps = (max(crossed.values(), default=0) + _SHORT[0], 1), 2
        if lengths[0] > _LONGEST:
            raise ModelLoadError(
                _beyond(name, crossed, "longer texts cannot be checked, because no tiny copy of its class can be built")
            )
    if not agrees(model, lengths, steps=steps):
        raise ModelLoadError(
            f"{name} cannot be served: it computes other logits in a batch with a draft tree than alone; {_ADVICE}"
        )


@torch.inference_mode()
def agrees(model: RunnerModel, lengths: Sequence[int], steps: int = 2, trees: bool = True) -> bool:
    """Returns whether texts of these lengths, each with a draft, get the module's plain logits in one batch.

    Args:
        lengths: tokens of each text.
        steps: decode steps; the drafts of one step are committed before the next.
        trees: whether the first text gets a draft tree; otherwise it gets a chain.

    Raises:
        ModelLoadError: the module cannot run with our masks, positions and cache.
    """
    handles = [model.open(_tokens(length, seed, model.vocab_size)) for seed, length in enumerate(lengths)]
    try:
        return all(_step(model, handles, trees) for _ in range(steps))
    except (ValueError, RuntimeError, TypeError, AttributeError, LookupError, AssertionError) as error:
        raise ModelLoadError(
            f"{type(_runner(model).module).__name__} does not take an explicit mask, positions and cache "
            f"({one_line(error)}); {_ADVICE}"
        ) from error
    finally:
        for handle in handles:
            model.close(handle)


def _failure(model: RunnerModel) -> str:
    if agrees(model, _RAGGED):
        return ""
    return next((text for lengths, trees, text in _STAGES if not agrees(model, lengths, trees=trees)), _STAGES[-1][2])


def _beyond(name: str, crossed: Mapping[str, int], reason: str) -> str:
    """Returns the message for a module that is correct only up to the lowest boundary."""
    lowest = min(crossed, key=lambda boundary: crossed[boundary])
    return (
        f"{name} cannot be served beyond its {lowest} of {crossed[lowest]} tokens: {reason}; "
        f"set max_model_len to at most {crossed[lowest]}"
    )


def _step(model: RunnerModel, handles: Sequence[Handle], trees: bool) -> bool:
    """Runs one step, and commits the path of each draft's last node. Returns whether every row agrees."""
    drafts = [_draft(at, len(handle.tokens), trees, model.vocab_size) for at, handle in enumerate(handles)]
    texts = [list(handle.tokens) for handle in handles]
    scores = model.score(handles, drafts)
    for text, draft, scored in zip(texts, drafts, scores, strict=True):
        for leaf in (at - 1 for at, children in enumerate(draft.children) if not children):
            path = draft.path(leaf)
            whole = torch.tensor([[*text, *(draft.ids[node] for node in path)]])
            expected = _runner(model).plain(whole)[0, len(text) - 1 :]
            if not _close(scored.logits[[0, *(node + 1 for node in path)]].float(), expected.float(), model.dtype):
                return False
    model.commit(handles, [[*(d.ids[node] for node in d.path(len(d) - 1)), 3] for d in drafts])
    return True


def _close(batched: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Returns whether logits differ by rounding only.

    Rounding errors are small compared with the spread of the logits; a wrong mask changes them by a fraction of it.
    """
    tolerance = (1e-3 if dtype in (torch.float32, torch.float64) else 0.1) * float(expected.std())
    return float((batched - expected).abs().max()) <= max(tolerance, 1e-5)


def _draft(at: int, length: int, trees: bool, vocab: int) -> Draft:
    """Returns a tree (or chain) for the first sequence, a chain for the second, and an empty draft for the others."""
    tokens = _tokens(max(0, 2 - at), length, vocab)
    return Draft.tree(2 * tokens, _TREE) if trees and at == 0 else Draft.chain(tokens)


def _tokens(count: int, seed: int, vocab: int) -> list[int]:
    """Returns tokens that recur, as in real text. They avoid the lowest ids, which are often special tokens."""
    return [(3 + (4 * seed + 7 * at) % 13) % vocab for at in range(count)]
