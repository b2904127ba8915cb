"""A tokenizer as the metadata of a GGUF file: the inverse of ``tokenizer.py``."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from gguf import GGUFWriter, TokenType

from foretoken.core.errors import InvalidRequest
from foretoken.models.formats.gguf.tokenizer import ENDS, PRE_TOKENIZERS, splits
from foretoken.models.formats.tokenizer import SPACE

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_UNRANKED = -1000.0  # llama.cpp's score of tokens that no merge leads to
_NFC = {"type": "NFC"}
_DIGITS = {"type": "Digits", "individual_digits": True}
_SPLIT_DIGITS = {"type": "Split", "pattern": {"Regex": r"\p{N}"}, "behavior": "Isolated", "invert": False}
# Texts whose ids must be the same when the tokenizer is read back.
PROBES = (
    "def f(x):\n    return x ** 2  # squared\n",
    "Hello, World! It's 2026 and we'LL see 3.14159, 1000000...",
    "  leading and trailing  \t\r\n\n   \n",
    "naïve café e\u0301 \u1e9b\u0323 Ünï Привет שלום 한국어 漢字かな 🙂🏽👩‍👩‍👧 \u200b\ufeff",
    "camelCaseXML_HTTPServer /** path/to/file */ != => ::<|>[]{}",
    "",
)


def add_tokenizer(writer: GGUFWriter, tokenizer: Any, ends: Sequence[int], vocab: int) -> None:
    """Adds a tokenizer with its special tokens and chat template.

    Args:
        tokenizer: as ``load_tokenizer`` returns it.
        ends: ids of the tokens that end a text.
        vocab: rows of the embedding; ids without a token are padding.

    Raises:
        InvalidRequest: GGUF has no form for this tokenizer.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise _unknown("it has no tokenizer.json")
    content = json.loads(backend.to_str())
    model = content["model"]
    if model.get("type") != "BPE":
        raise _unknown(f"its model is {model.get('type')}")
    byte_level = not model.get("byte_fallback")
    tokens, kinds = _tokens(backend, content, vocab, byte_level)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    writer.add_tokenizer_model("gpt2" if byte_level else "llama")
    writer.add_tokenizer_pre(_rule(content) if byte_level else "default")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    if not byte_level:
        writer.add_token_scores(_scores(tokens, merges))
        writer.add_add_space_prefix(_prefixes(content))
    if merges:
        writer.add_token_merges(merges)
    _add_special(writer, tokenizer, content, ends)
    _add_template(writer, tokenizer)


def _tokens(backend: Any, content: Mapping[str, Any], vocab: int, byte_level: bool) -> tuple[list[str], list[int]]:
    by_id = {i: token for token, i in backend.get_vocab(with_added_tokens=True).items()}
    if max(by_id) >= vocab:
        raise InvalidRequest(f"the tokenizer has {max(by_id) + 1} tokens, but the embedding {vocab} rows")
    added = {token["content"]: token["special"] for token in content["added_tokens"]}
    unknown = content["model"].get("unk_token")
    tokens: list[str] = []
    kinds: list[int] = []
    for i in range(vocab):
        token, kind = by_id.get(i, f"[PAD{i}]"), TokenType.NORMAL
        if i not in by_id:
            kind = TokenType.UNUSED
        elif not byte_level and token == unknown:
            kind = TokenType.UNKNOWN
        elif token in added:
            kind = TokenType.CONTROL if added[token] else TokenType.USER_DEFINED
        elif not byte_level and _BYTE.fullmatch(token):
            kind = TokenType.BYTE
        if kind == TokenType.USER_DEFINED and not byte_level:
            token = token.replace(SPACE, " ")
        tokens.append(token)
        kinds.append(kind)
    return tokens, kinds


def _rule(content: Mapping[str, Any]) -> str:
    """Returns llama.cpp's name of a byte-level tokenizer's rule for splitting text."""
    parts = content["pre_tokenizer"] or {}
    parts = parts["pretokenizers"] if parts.get("type") == "Sequence" else [parts]
    steps = [_SPLIT_DIGITS if part == _DIGITS else part for part in parts]
    normalizer, ignore_merges = content["normalizer"], bool(content["model"].get("ignore_merges"))
    for name, rule in PRE_TOKENIZERS.items():
        same = splits(rule)["pretokenizers"] == steps or _plain(splits(rule)["pretokenizers"]) == _plain(steps)
        if same and rule.ignore_merges == ignore_merges and normalizer == (_NFC if rule.nfc else None):
            return name
    raise _unknown(f"it splits text by {json.dumps(content['pre_tokenizer'])[:200]}")


def _plain(parts: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Returns pre-tokenizers without fields that do not change the ids."""
    return [{key: value for key, value in part.items() if key != "trim_offsets"} for part in parts]


def _prefixes(content: Mapping[str, Any]) -> bool:
    """Returns whether a SentencePiece tokenizer puts a space before a text."""
    metaspace = content["pre_tokenizer"] or {}
    return '"Prepend"' in json.dumps(content["normalizer"]) or metaspace.get("prepend_scheme") in ("first", "always")


def _scores(tokens: Sequence[str], merges: Sequence[str]) -> list[float]:
    """Returns the scores by which SentencePiece merges: earlier merges have higher ones."""
    ranks: dict[str, int] = {}
    for merge in merges:
        ranks.setdefault(merge.replace(" ", "", 1), len(ranks))
    return [-float(ranks[token]) if token in ranks else _UNRANKED - len(ranks) for token in tokens]


def _add_special(writer: GGUFWriter, tokenizer: Any, content: Mapping[str, Any], ends: Sequence[int]) -> None:
    """Adds the ids of special tokens, and whether texts begin and end with them."""
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    processor = json.dumps(content["post_processor"] or {})
    single = json.dumps((content["post_processor"] or {}).get("single", processor))
    for key, i in (("bos", bos), ("unk", tokenizer.unk_token_id), ("pad", tokenizer.pad_token_id)):
        if i is not None:
            getattr(writer, f"add_{key}_token_id")(i)
    first = eos if eos in ends or not ends else ends[0]
    special = {token["id"] for token in content["added_tokens"] if token["special"] and token["content"] in ENDS}
    others = sorted((i for i in dict.fromkeys(ends) if i != first), key=special.__contains__)
    if any(i not in special for i in others[2:]):  # the others are recognised by their texts
        raise InvalidRequest(f"texts of this model end with {len(others) + 1} tokens; a GGUF file names at most 3")
    for key, i in zip(("eos", "eot", "eom"), (first, *others), strict=False):
        if i is not None:
            getattr(writer, f"add_{key}_token_id")(i)
    begins, closes = (
        token is not None and f'"SpecialToken": {{"id": {json.dumps(token)}' in single
        for token in (tokenizer.bos_token, tokenizer.eos_token)
    )
    writer.add_add_bos_token(begins)
    writer.add_add_eos_token(closes and not (begins and bos == eos))


def _add_template(writer: GGUFWriter, tokenizer: Any) -> None:
    template = tokenizer.chat_template
    if isinstance(template, Mapping):
        template = [{"name": name, "template": text} for name, text in template.items()]
    if template:
        writer.add_chat_template(template)


def _unknown(reason: str) -> InvalidRequest:
    return InvalidRequest(
        f"a GGUF file has no form for this model's tokenizer ({reason}); choose int8 or int4, which are written as a "
        "folder with the tokenizer as it is"
    )
