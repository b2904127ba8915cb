"""The EAGLE layer on our runners against plain torch, written from the papers, and its measured taps."""

import itertools
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.models.heads import tiny
from tests.models.tiny import only_runner
from tests.models.trees import repeating
from torch import Tensor

from foretoken.core.draft import Draft
from foretoken.models.formats.checkpoint import load_tokenizer
from foretoken.models.heads.eagle import EagleNet, read_eagle
from foretoken.models.heads.feature_net import HeadHandle
from foretoken.models.heads.loading import load_eagle
from foretoken.models.heads.taps import PROMPTS, TOKENS
from foretoken.models.loading import load_model
from foretoken.models.runners.pass_plan import Tapped, TapRows

CPU = torch.device("cpu")


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


class Reference:
    """One sequence, all rows at once: row i sees rows 0..i."""

    def __init__(self, config: dict[str, Any], tensors: tiny.Tensors, unembed: Tensor | None = None) -> None:
        self.c, self.t, self.unembed = config, tensors, unembed

    def norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.t.get(f"{name}.weight")
        if weight is None:
            return x
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.c["rms_norm_eps"]) * weight

    def features(self, raw: Tensor) -> Tensor:
        if "midlayer.hidden_norm.weight" not in self.t:
            return raw
        raw = self.norm(raw, "input_norm")
        if self.c.get("fc_norm"):
            parts = raw.split(self.c["target_hidden_size"], -1)
            raw = torch.cat([self.norm(p, f"fc_norm.{i}") for i, p in enumerate(parts)], -1)
        return raw @ self.t["fc.weight"].T

    def run(self, tokens: list[int], fed: Tensor) -> tuple[Tensor, Tensor]:
        """tokens: [n]; fed: features [n, H]. -> logits [n, Vd], what is fed to the rows below"""
        embedded = self.t["embed_tokens.weight"][tokens]
        three = "midlayer.hidden_norm.weight" in self.t
        x = fed if three else torch.cat([embedded, fed], -1) @ self.t["fc.weight"].T + self.t["fc.bias"]
        for i in range(self.c["num_hidden_layers"]):
            at = "midlayer" if three and i == 0 else f"layers.{i}"
            residual = x
            if three and i == 0:
                normed = self.norm(x, "midlayer.hidden_norm")
                residual = normed if self.c.get("norm_before_residual") else x
                reads = torch.cat([self.norm(embedded, f"{at}.input_layernorm"), normed], -1)
            else:
                reads = self.norm(x, f"{at}.input_layernorm")
            x = residual + self.attend(reads, at)
            y = self.norm(x, f"{at}.post_attention_layernorm")
            gate = F.silu(y @ self.t[f"{at}.mlp.gate_proj.weight"].T)
            x = x + (gate * (y @ self.t[f"{at}.mlp.up_proj.weight"].T)) @ self.t[f"{at}.mlp.down_proj.weight"].T
        out = self.norm(x, "norm")
        head = self.t["lm_head.weight"] if self.unembed is None else self.unembed
        return out @ head.T, out if self.c.get("norm_output") else x

    def attend(self, x: Tensor, at: str) -> Tensor:
        heads, kv, dim = (self.c[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        n = len(x)
        q, k, v = ((x @ self.t[f"{at}.self_attn.{p}_proj.weight"].T).view(n, -1, dim).transpose(0, 1) for p in "qkv")
        angles = torch.outer(torch.arange(n).float(), 1e4 ** (-torch.arange(0, dim, 2).float() / dim))
        cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)

        def turn(y: Tensor) -> Tensor:
            half = dim // 2
            return y * cos + torch.cat([-y[..., half:], y[..., :half]], -1) * sin

        q, k, v = turn(q), turn(k).repeat_interleave(heads // kv, 0), v.repeat_interleave(heads // kv, 0)
        scores = q @ k.transpose(1, 2) * dim**-0.5 + torch.full((n, n), -torch.inf).triu(1)
        scores = scores + torch.full((n, n), -torch.inf).tril(-self.c.get("sliding_window", n))
        mixed = scores.softmax(-1) @ v
        return mixed.transpose(0, 1).reshape(n, -1) @ self.t[f"{at}.self_attn.o_proj.weight"].T


HEADS = {
    "eagle3": tiny.eagle3(),
    "norm_before_residual": tiny.eagle3(norm_before_residual=True),
    "two layers": tiny.eagle3(layers=2),
    "other norms": tiny.eagle3(norm_before_fc=True, fc_norm=True, norm_output=True),
    "eagle 3.1": tiny.eagle3(fc_norm=True, norm_output=True),
    "window": tiny.eagle3(layer_types=["sliding_attention"], sliding_window=4),
    "narrow": tiny.eagle3(hidden=32, target_hidden=64),
    "eagle1": tiny.eagle1(layers=2),
}


def append(net: EagleNet, handle: HeadHandle, tokens: list[int], raw: Tensor) -> None:
    """Appends tokens with states that lie among others, each layer's in a tensor of its own."""
    around = torch.cat([_random(1, raw.shape[1]), raw, _random(2, raw.shape[1])])
    states = around.split(net.head.target_hidden if net.joined else raw.shape[1], dim=1)
    taps: Mapping[int, Tensor] = dict(enumerate(states))
    if len(raw) > 1:  # as one pass of the kernels returns them
        taps = Tapped(range(len(states)), torch.stack(states).numpy())
    net.append(handle, tokens, TapRows.of(taps, range(len(taps)), range(1, 1 + len(raw))))


@pytest.mark.parametrize("runner", ["compiled", "torch"])
@pytest.mark.parametrize("name", ["eagle3", "narrow", "norm_before_residual", "other norms", "window"])
def test_rows_do_not_depend_on_how_states_are_prefilled(name: str, runner: str, tmp_path: Path) -> None:
    config, tensors = HEADS[name]
    head = read_eagle(tiny.save(tmp_path, config, tensors))
    with only_runner(runner):
        net = EagleNet(head, tensors["embed_tokens.weight"], torch.float32, CPU, 2048)
    tokens = torch.randint(0, 101, (600,), generator=torch.Generator().manual_seed(3)).tolist()
    raw = _random(600, 3 * head.target_hidden)
    results = []
    for sizes in ((600,), (300, 299, 1), (599, 1), (1,) * 40 + (560,)):
        handle, at = net.open(), 0
        for size in sizes:
            append(net, handle, tokens[at : at + size], raw[at : at + size])
            at += size
            if size == 299:
                net.prefill(handle)
        results.append(net.catch_up([handle])[0])
        assert handle.num_pending == 0 and not handle.taps and not handle.fresh
    assert runner == "torch" or all(torch.equal(result, results[0]) for result in results)
    for result in results:
        torch.testing.assert_close(result, results[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("appended", ["features", "states", "one of each"])
@pytest.mark.parametrize("runner", ["compiled", "torch"])
@pytest.mark.parametrize("name", HEADS)
@pytest.mark.slow
def test_the_net_equals_the_papers_equations(name: str, runner: str, appended: str, tmp_path: Path) -> None:
    config, tensors = HEADS[name]
    unembed = None if "lm_head.weight" in tensors else _random(101, config["hidden_size"])
    head = read_eagle(tiny.save(tmp_path, config, tensors))
    with only_runner(runner):
        net = EagleNet(
            head,
            tensors["embed_tokens.weight"],
            torch.float32,
            CPU,
            512,
            None if unembed is None else (lambda x: x @ unembed.T),
        )
    reference = Reference(config, tensors, unembed)
    tokens = torch.randint(0, 101, (9,), generator=torch.Generator().manual_seed(3)).tolist()
    raw = _random(9, 3 * head.target_hidden if head.version == 3 else head.hidden)
    features = reference.features(raw)
    torch.testing.assert_close(net.features(raw), features, rtol=1e-4, atol=1e-4)
    whole, states = reference.run(tokens, features)
    close = {"rtol": 1e-3, "atol": 2e-3}
    torch.testing.assert_close(net.teacher_forced(tokens, net.features(raw)), whole, **close)

    # Two sequences that share passes; the second is a piece of the first, and comes in two pieces.
    first, second = net.open(), net.open()
    if appended == "states":
        append(net, first, tokens, raw)
    else:
        net.extend(first, tokens, net.features(raw))
    if appended == "features":
        net.extend(second, tokens[:2], net.features(raw[:2]))
    else:
        append(net, second, tokens[:1], raw[:1])
        append(net, second, tokens[1:2], raw[1:2])
    rows = net.catch_up([first, second])
    torch.testing.assert_close(rows[0], whole[-1:], **close)
    torch.testing.assert_close(rows[1], whole[1:2], **close)
    tree = repeating((-1, -1, 0))
    grown = [net.grow([first], [Draft(tree.ids[:2], tree.parents[:2])])[0], net.grow([first], [tree])[0]]
    below, more = reference.run([*tokens, 5], torch.cat([features, states[-1:]]))
    other, _ = reference.run([*tokens, 6], torch.cat([features, states[-1:]]))
    third, _ = reference.run([*tokens, 5, 6], torch.cat([features, states[-1:], more[-1:]]))
    expected = torch.stack([below[-1], other[-1], third[-1]])
    torch.testing.assert_close(torch.cat(grown), expected, **close)

    # What was drafted is dropped for the truth.
    net.extend(first, [5], net.features(raw[:1]))
    net.extend(second, tokens[2:], net.features(raw[2:]))
    rows = net.catch_up([first, second])
    truth, _ = reference.run([*tokens, 5], torch.cat([features, features[:1]]))
    torch.testing.assert_close(rows[0], truth[-1:], **close)
    torch.testing.assert_close(rows[1], whole[-1:], **close)


@pytest.mark.parametrize("runner", ["compiled", "torch"])
def test_rows_of_mask_tokens_follow_the_newest_token(runner: str, tmp_path: Path) -> None:
    """P-EAGLE: one pass over pending rows and mask tokens; the next step knows nothing of the masks."""
    config, tensors = tiny.eagle3(mask=7)
    head = read_eagle(tiny.save(tmp_path, config, tensors))
    assert head.mask_token == 7
    with only_runner(runner):
        net = EagleNet(head, tensors["embed_tokens.weight"], torch.float32, CPU, 512)
    reference = Reference(config, tensors)
    mask = reference.features(tensors["mask_hidden"].view(1, -1))
    torch.testing.assert_close(net.mask_row().features, mask, rtol=1e-4, atol=1e-4)
    tokens, raw = [3, 9, 4, 8, 60], _random(5, 192)
    features = reference.features(raw)
    handles = [net.open(), net.open()]
    net.extend(handles[0], tokens, net.features(raw))
    net.extend(handles[1], tokens[:2], net.features(raw[:2]))
    masks = [Draft.chain([7] * 3), Draft.empty()]
    net.mask = net.mask_row()
    rows = net.look_ahead(handles, masks)
    whole, _ = reference.run([*tokens, 7, 7, 7], torch.cat([features, mask.expand(3, -1)]))
    short, _ = reference.run(tokens[:2], features[:2])
    close = {"rtol": 1e-3, "atol": 2e-3}
    torch.testing.assert_close(rows[0], whole[4:], **close)
    torch.testing.assert_close(rows[1], short[-1:], **close)
    net.extend(handles[0], [5], net.features(raw[:1]))
    after, _ = reference.run([*tokens, 5], torch.cat([features, features[:1]]))
    torch.testing.assert_close(net.catch_up(handles[:1])[0], after[-1:], **close)


def test_long_prompts_are_prefilled_in_chunks(tmp_path: Path) -> None:
    config, tensors = HEADS["eagle3"]
    head = read_eagle(tiny.save(tmp_path, config, tensors))
    net = EagleNet(head, tensors["embed_tokens.weight"], torch.float32, CPU, 2048)
    tokens, raw = [i % 101 for i in range(600)], _random(600, 192)
    whole = net.teacher_forced(tokens, net.features(raw))
    handle = net.open()
    net.extend(handle, tokens, net.features(raw))
    torch.testing.assert_close(net.catch_up([handle])[0], whole[-1:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_do_not_depend_on_what_shares_the_pass(dtype: torch.dtype, tmp_path: Path) -> None:
    config, tensors = HEADS["eagle3"]
    head = read_eagle(tiny.save(tmp_path, config, tensors))
    net = EagleNet(head, tensors["embed_tokens.weight"], dtype, CPU, 512)
    if not net.batch_invariant:
        pytest.skip("no compiled kernels here")
    raw = [_random(n, 192) for n in (3, 11, 40)]
    tokens = [[i % 101 for i in range(len(part))] for part in raw]
    alone = [net.teacher_forced(t, net.features(r))[-1:] for t, r in zip(tokens, raw, strict=True)]
    handles = [net.open() for _ in raw]
    for handle, t, r in zip(handles, tokens, raw, strict=True):
        net.extend(handle, t, net.features(r))
    for one, other in itertools.zip_longest(net.catch_up(handles), alone):
        assert torch.equal(one, other)


def test_the_prefix_cache_serves_a_sequence_with_a_common_prefix(tmp_path: Path) -> None:
    config, tensors = HEADS["eagle3"]
    head = read_eagle(tiny.save(tmp_path, config, tensors))
    net = EagleNet(head, tensors["embed_tokens.weight"], torch.float32, CPU, 512)
    net.enable_prefix_cache(2**24)
    if not net.keeps:
        pytest.skip("no compiled kernels here")
    tokens, features = [(3 * i) % 101 for i in range(150)], net.features(_random(149, 192))
    first = net.open(tokens)
    assert first.cached == 0
    net.extend(first, tokens[1:], features)
    expected = net.catch_up([first])[0]
    net.grow([first], [Draft.tree([5, 6], (-1, -1))])
    net.close(first)

    second = net.open(tokens[:149])
    assert second.cached == 128 and second.tokens == tokens[1:129]
    net.extend(second, tokens[129:], features[128:])
    assert torch.equal(net.catch_up([second])[0], expected)
    # Row 127 is made of token 128, row 0 of token 0: a text that has another there finds less, or nothing.
    assert net.open([*tokens[:128], 7, *tokens[129:]]).cached == 64
    assert net.open([9, *tokens[1:]]).cached == 0
    assert net.open(tokens[:149], "another salt").cached == 0
    assert net.open(tokens[:1]).cached == 0 and net.open(tokens[:64]).cached == 0 and net.open(tokens[:66]).cached == 64


def learnt(target: Any, tokenizer: Any, written: tuple[dict[str, Any], tiny.Tensors], taps: tuple[int, ...]) -> None:
    """Teach the head of ``written`` the target's greedy text by rote: fc reads it off the states at ``taps``.

    With its layer silenced and its norm at one, the head is a linear map of what it is fed.
    """
    _, tensors = written
    seen, next_tokens = [], []
    for prompt in PROMPTS:
        handle = target.open(list(tokenizer(prompt)["input_ids"]))
        for _ in range(TOKENS + 2):
            scores = target.score([handle], [Draft.empty()], taps)[0]
            token = int(scores.logits[-1].argmax())
            seen.append(torch.cat([scores.taps[i][-1] for i in taps]))
            next_tokens.append(token)
            target.commit([handle], [[token]])
        seen.pop()
        next_tokens.pop(len(next_tokens) - TOKENS - 2)  # a row predicts the token after the next
        target.close(handle)
    states, ids = torch.stack(seen), torch.tensor(next_tokens)
    hidden = tensors["fc.weight"].shape[0]
    head_weights = tensors["lm_head.weight"] = torch.nn.functional.normalize(tensors["lm_head.weight"], dim=-1)
    tensors["fc.weight"] = (torch.linalg.pinv(states) @ head_weights[ids]).T.contiguous()
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"midlayer.{name}.weight"].zero_()
    tensors["norm.weight"] = torch.ones(hidden)


@pytest.mark.parametrize("shift", [0, 1])
def test_the_better_convention_is_used_and_logged(shift, tiny_pair, tmp_path, caplog):
    target, tokenizer = load_model(tiny_pair.target, "float32", "cpu"), load_tokenizer(tiny_pair.target)
    written = tiny.eagle3(vocab=target.vocab_size, draft_vocab=target.vocab_size, hidden=64, taps=(0, 1, 1))
    learnt(target, tokenizer, written, (shift, 1 + shift, 1 + shift))
    config, tensors = written
    del config["foretoken_taps"]
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, 1, 1]}
    folder = tiny.save(tmp_path, config, tensors)
    with caplog.at_level(logging.INFO):
        loaded = load_eagle(target, tokenizer, folder, None)
    assert loaded.taps == (shift, 1 + shift, 1 + shift)
    assert loaded.convention is not None
    right, wrong = loaded.convention.inputs, loaded.convention.outputs
    if shift:
        right, wrong = wrong, right
    assert right > 0.5 > wrong
    assert f"as the {'outputs' if shift else 'inputs'} of those layers" in caplog.text


def test_nothing_is_measured_if_the_ids_are_unambiguous(tiny_pair: Any, tmp_path: Path) -> None:
    target = load_model(tiny_pair.target, "float32", "cpu")
    folder = tiny.save(tmp_path, *tiny.eagle3(vocab=target.vocab_size))
    assert load_eagle(target, None, folder, None).convention is None


def test_the_last_layer_has_one_convention(tiny_pair: Any, tmp_path: Path) -> None:
    target, tokenizer = load_model(tiny_pair.target, "float32", "cpu"), load_tokenizer(tiny_pair.target)
    config, tensors = tiny.eagle3(vocab=target.vocab_size, taps=(1, 2, 3))
    del config["foretoken_taps"]
    config["eagle_aux_hidden_state_layer_ids"] = [1, 2, 3]
    loaded = load_eagle(target, tokenizer, tiny.save(tmp_path, config, tensors), None)
    assert loaded.taps == (1, 2, 3)
