"""Batch invariance, bit for bit: logits do not depend on row counts, key lengths, trees or the batch."""

import pytest
import torch

from foretoken.core.draft import Draft
from foretoken.models.base import Handle
from foretoken.models.decoder import Decoder, split_evenly
from foretoken.models.runners.linear import AMX_ROWS, can_pack
from foretoken.models.runners.pass_plan import PassPlan

from .plain import one_by_one
from .tiny import only_runner
from .trees import repeating

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
NUMBERS: dict[str, tuple[torch.dtype, str | None, str]] = {
    "float32": (torch.float32, None, "auto"),
    "bfloat16": (torch.bfloat16, None, "auto"),
    "int8": (torch.bfloat16, "int8", "auto"),
}
CACHES: dict[str, tuple[torch.dtype, str | None, str]] = {  # which torch operators do not have
    "float32, int8 cache": (torch.float32, None, "int8"),
    "int8, int8 cache": (torch.bfloat16, "int8", "int8"),
    "float32, bfloat16 cache": (torch.float32, None, "bfloat16"),
}
VOCAB = 256


@pytest.fixture(autouse=True)
def two_threads() -> None:
    """Computes with two threads, so that rows are divided among threads. ``conftest`` restores the number."""
    torch.set_num_threads(2)


KINDS = [f"{numbers}-{runner}" for numbers in NUMBERS for runner in ("compiled", "torch")]
KINDS += [f"{numbers}-compiled" for numbers in CACHES]
KINDS += [f"{numbers}-cuda" for numbers in NUMBERS | CACHES if torch.cuda.is_available()]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Which numbers on which runner."""
    name: str = request.param
    return name


def decoder(kind: str, heads: int = 4, kv_heads: int = 2, dim: int = 32, **changes: object) -> Decoder:
    numbers, runner = kind.split("-")
    dtype, quantization, kv_cache_dtype = (NUMBERS | CACHES)[numbers]
    device = CUDA if runner == "cuda" else CPU
    if device == CPU and not can_pack(dtype, CPU):
        pytest.skip(f"this machine has no packed {dtype} products; its rows are not promised to be independent")
    hidden, width, layers = 96, 160, 2
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.15

    weights = {"model.embed_tokens.weight": random(VOCAB, hidden) * 6, "model.norm.weight": torch.ones(hidden)}
    for i in range(layers):
        at = f"model.layers.{i}"
        weights |= {
            f"{at}.input_layernorm.weight": 1 + random(hidden),
            f"{at}.post_attention_layernorm.weight": 1 + random(hidden),
            f"{at}.self_attn.q_proj.weight": random(heads * dim, hidden),
            f"{at}.self_attn.k_proj.weight": random(kv_heads * dim, hidden),
            f"{at}.self_attn.v_proj.weight": random(kv_heads * dim, hidden),
            f"{at}.self_attn.o_proj.weight": random(hidden, heads * dim),
            f"{at}.mlp.gate_proj.weight": random(width, hidden),
            f"{at}.mlp.up_proj.weight": random(width, hidden),
            f"{at}.mlp.down_proj.weight": random(hidden, width),
        }
    config = {
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": dim,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        **changes,
    }
    if config["model_type"] == "gemma2":
        for i in range(layers):
            for at in ("pre_feedforward", "post_feedforward"):
                weights[f"model.layers.{i}.{at}_layernorm.weight"] = random(hidden)
    with only_runner(runner):
        return Decoder(config, weights, dtype, device, quantization=quantization, kv_cache_dtype=kv_cache_dtype)


def tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def neighbours(model: Decoder, length: int) -> tuple[list[Handle], list[Draft]]:
    drafts = [Draft.empty(), Draft.chain(tokens(5, 1)), repeating((-1, 0, -1, 1))]
    return [model.open(tokens(length, 3 + i)) for i in range(3)], drafts


@pytest.mark.parametrize("heads", [(4, 2), (4, 4), (8, 1)])
@pytest.mark.parametrize("length", [3, 300])
@pytest.mark.slow
def test_chains_equal_plain_decoding(kind: str, heads: tuple[int, int], length: int) -> None:
    model = decoder(kind, *heads)
    prompt, continuation = tokens(length), tokens(17, seed=9)
    expected = one_by_one(model, prompt, continuation)
    for depth in (1, 2, 3, 4, 7, 8, 16):
        handle = model.open(prompt)
        got = model.score([handle], [Draft.chain(continuation[:depth])])[0].logits
        model.close(handle)
        for row in range(depth + 1):
            assert torch.equal(got[row], expected[row]), (depth, row)


@pytest.mark.parametrize("other", [5, 300, 1200])
@pytest.mark.slow
def test_other_sequences_change_no_bit(kind: str, other: int) -> None:
    model = decoder(kind)
    prompt, continuation = tokens(100), tokens(5, seed=9)
    expected = one_by_one(model, prompt, continuation)
    handles, drafts = neighbours(model, other)
    last = model.open(prompt)
    got = model.score([*handles, last], [*drafts, Draft.chain(continuation[:4])])[-1].logits
    for row in range(5):
        assert torch.equal(got[row], expected[row]), row


@pytest.mark.parametrize("threads", [1, 3])
def test_the_number_of_threads_changes_no_bit(kind: str, threads: int) -> None:
    prompt, continuation = tokens(300), tokens(5, seed=9)
    expected = one_by_one(decoder(kind), prompt, continuation)
    torch.set_num_threads(threads)
    model = decoder(kind)
    got = model.score([model.open(prompt)], [Draft.chain(continuation[:4])])[0].logits
    assert all(torch.equal(got[row], expected[row]) for row in range(5))


def test_the_order_of_slots_does_not_matter(kind: str) -> None:
    """A sequence that joins late may take a lower slot than those before it in the batch."""
    model = decoder(kind)
    prompts, continuation = [tokens(20, seed=1), tokens(30, seed=2)], tokens(3, seed=9)
    expected = [one_by_one(model, prompt, continuation) for prompt in prompts]
    handles = [model.open(prompt) for prompt in prompts]
    for order in ([0, 1], [1, 0]):
        got = model.score([handles[i] for i in order], [Draft.chain(continuation[:2])] * 2)
        for i, scores in zip(order, got, strict=True):
            assert all(torch.equal(scores.logits[row], expected[i][row]) for row in range(3))
        model.commit(handles, [[], []])


def test_every_path_of_a_tree_equals_plain_decoding(kind: str) -> None:
    model = decoder(kind)
    prompt = tokens(150)
    draft = repeating((-1, 0, -1, 0, 1, 2, 4, 4, 7))
    handle = model.open(prompt)
    got = model.score([handle], [draft])[0].logits
    for node in range(len(draft)):
        path = [draft.ids[i] for i in draft.path(node)]
        expected = one_by_one(model, prompt, [*path, 0])
        assert torch.equal(got[node + 1], expected[-1]), node


@pytest.mark.parametrize("node", [4, 5])
def test_an_accepted_tree_path_leaves_the_cache_as_plain_decoding_would(kind: str, node: int) -> None:
    model = decoder(kind)
    prompt = tokens(80)
    draft = repeating((-1, 0, -1, 2, 3, 0))  # paths of 2, 3, 4 and of 0, 5
    accepted = [draft.ids[i] for i in draft.path(node)]
    handle = model.open(prompt)
    model.score([handle], [draft])
    model.commit([handle], [[*accepted, 99]])
    assert handle.cached == len(prompt) + len(accepted)
    after = model.score([handle], [Draft.chain([1, 2])])[0].logits
    expected = one_by_one(model, prompt, [*accepted, 99, 1, 2, 0])[-3:]
    for row in range(3):
        assert torch.equal(after[row], expected[row]), row


def test_growing_level_by_level_equals_one_pass(kind: str) -> None:
    model = decoder(kind)
    prompt = tokens(70)
    tree = repeating((-1, -1, 0, 1, 1, 3))
    whole = model.open(prompt)
    expected = model.score([whole], [tree])[0].logits
    grown, rows = model.open(prompt), []
    for nodes in (0, 2, 5, 6):
        part = Draft(tree.ids[:nodes], tree.parents[:nodes])
        rows.append(model.score([grown], [part])[0].logits)
    assert torch.equal(torch.cat(rows), expected)


def test_an_abandoned_step_leaves_no_trace(kind: str) -> None:
    model = decoder(kind)
    prompt, continuation = tokens(50), tokens(4, seed=9)
    expected = one_by_one(model, prompt, continuation)
    for left in (Draft.empty(), Draft.chain([3, 4, 5])):
        handle = model.open(prompt)
        model.score([handle], [left])
        model.commit([handle], [[]])
        got = model.score([handle], [Draft.chain(continuation[:3])])[0].logits
        model.close(handle)
        assert got.shape[0] == 4
        for row in range(4):
            assert torch.equal(got[row], expected[row]), row


def test_more_rows_than_one_kernel_takes(kind: str) -> None:
    """Some CPUs have other kernels for many rows; a batch must not come to them and a single sequence not."""
    model = decoder(kind)
    handles = [model.open(tokens(40, seed=20 + i)) for i in range(8)]
    drafts = [Draft.chain(tokens(8, seed=30 + i)) for i in range(8)]
    assert sum(len(draft) + 1 for draft in drafts) > 2 * AMX_ROWS
    together = model.score(handles, drafts)
    for i, (draft, scores) in enumerate(zip(drafts, together, strict=True)):
        alone = model.open(tokens(40, seed=20 + i))
        assert torch.equal(model.score([alone], [draft])[0].logits, scores.logits)


@pytest.mark.parametrize("most", [1, 30, 60])
def test_a_batch_that_takes_several_passes(kind: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder(kind)
    passes, run = [], model.runner.run
    monkeypatch.setattr(model.runner, "run", lambda plan, *rest: (passes.append(len(plan.parts)), run(plan, *rest))[1])
    expected = model.score(*neighbours(model, 20), taps=(1, 2))
    assert passes == [3]
    model.runner.pass_rows = most
    handles, drafts = neighbours(model, 20)
    got = model.score(handles, drafts, taps=(1, 2))
    assert passes[1:] == ([1, 1, 1] if most < 60 else [2, 1])
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one.logits, other.logits) and one.first == other.first == 0
        assert one.taps[1].shape[0] >= 20 and all(torch.equal(one.taps[i], other.taps[i]) for i in (1, 2))
    model.commit(handles, [[*draft.ids[:1], 7] for draft in drafts])
    assert [handle.cached for handle in handles] == [20, 21, 21]


def test_a_step_whose_second_pass_fails_leaves_no_trace(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder(kind)
    expected = [scores.logits for scores in model.score(*neighbours(model, 20))]
    model.runner.pass_rows, run, passes = 1, model.runner.run, []

    def failing(plan: PassPlan, *rest: object) -> object:
        passes.append(plan)
        if len(passes) == 2:
            raise MemoryError
        return run(plan, *rest)  # type: ignore[arg-type]

    handles, drafts = neighbours(model, 20)
    with monkeypatch.context() as patch:
        patch.setattr(model.runner, "run", failing)
        with pytest.raises(MemoryError):
            model.score(handles, drafts)
    model.commit(handles, [[]] * 3)
    assert all(torch.equal(a.logits, b) for a, b in zip(model.score(handles, drafts), expected, strict=True))


@pytest.mark.parametrize(
    ("sizes", "max_rows", "ends"),
    [([], 4, []), ([9], 4, [1]), ([70] * 8, 512, [4, 8]), ([1, 1, 1], 1, [1, 2, 3]), ([5, 1, 1, 5], 6, [2, 4])],
)
def test_a_batch_is_divided_evenly(sizes: list[int], max_rows: int, ends: list[int]) -> None:
    assert [group.stop for group in split_evenly(sizes, max_rows)] == ends


def test_soft_caps_and_windows(kind: str) -> None:
    """Features of Gemma 2: capped scores and logits, windows in every other layer, norms after attention and MLP."""
    model = decoder(kind, model_type="gemma2", query_pre_attn_scalar=32, sliding_window=50, attn_logit_softcapping=5.0)
    prompt, continuation = tokens(100), tokens(9, seed=9)
    expected = one_by_one(model, prompt, continuation)
    handle = model.open(prompt)
    got = model.score([handle], [Draft.chain(continuation[:8])])[0].logits
    assert all(torch.equal(got[row], expected[row]) for row in range(9))


def test_rows_do_not_depend_on_memory_beyond_windows(kind: str) -> None:
    """Without a prefix cache, the first layer's keys and values beyond its window are given back."""
    logits = []
    for keeps in (False, True):
        model = decoder(kind, model_type="gemma2", query_pre_attn_scalar=32, sliding_window=50)
        if keeps:
            model.enable_prefix_cache(2**24)
        handle, rows = model.open(tokens(300)), []
        for length in (300, 400, 180):  # the last one is truncated to where rows see what is gone
            if length < len(handle.tokens):
                handle.truncate(length)
            else:
                model.commit([handle], [tokens(length - len(handle.tokens), seed=length)])
            for token in tokens(4, seed=1):
                rows.append(model.score([handle], [Draft.chain(tokens(3, seed=2))])[0].logits)
                model.commit([handle], [[token]])
        logits.append(torch.cat(rows))
    assert torch.equal(*logits)


def overflowing(kind: str) -> tuple[Decoder, int]:
    """A model whose values are not finite at one token, and that token."""
    odd, made = 7, Decoder.__init__

    def changed(self, config, weights, *args, **options):  # type: ignore[no-untyped-def]
        weights["model.embed_tokens.weight"][:, 0] = 0.0
        weights["model.embed_tokens.weight"][odd, 0] = 1.0
        weights["model.layers.0.input_layernorm.weight"][0] = 1e30
        for name, value in (("q_proj", 0.0), ("k_proj", 0.0), ("v_proj", 1e10)):
            weights[f"model.layers.0.self_attn.{name}.weight"][:, 0] = value
        made(self, config, weights, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Decoder, "__init__", changed)
        return decoder(kind), odd


def test_values_that_are_not_finite_change_no_other_row(kind: str) -> None:
    """A weight of 0 times infinity is NaN, so such values must not meet the weights of rows that do not see them."""
    model, odd = overflowing(kind)
    prompt, continuation = [t for t in tokens(70) if t != odd], [1, 2, 3]
    expected = one_by_one(model, prompt, continuation)
    assert all(row.isfinite().all() for row in expected)
    drafts = [
        Draft.chain([1, 2, odd, 4]),
        Draft.tree([odd, 1, 2, odd], (-1, -1, 1, 0)),
        Draft.tree([1, odd, 2, odd], (-1, 0, 0, 1)),
    ]
    rows = [(0, 1, 2), (0, 2, 3), (0, 1, 3)]
    for draft, seen in zip(drafts, rows, strict=True):
        handle, other = model.open(prompt), model.open([*prompt[:5], odd, *prompt[5:]])
        got = model.score([other, handle], [draft, draft])[1].logits
        for row, place in enumerate(seen):
            assert torch.equal(got[place], expected[row]), (draft.parents, place)
        model.close(handle)
        model.close(other)  # its slot, values included, is given to the next sequence


@pytest.mark.parametrize("window", [0, 700, 1027])
@pytest.mark.parametrize("numbers", NUMBERS | CACHES)
@pytest.mark.slow
def test_stretches_of_keys_change_no_bit(numbers: str, window: int) -> None:
    """Threads share the stretches of a single sequence; those of several sequences are computed one after the other."""
    changes = {"model_type": "mistral", "sliding_window": window} if window else {}
    model = decoder(f"{numbers}-compiled", **changes)
    prompt, continuation = tokens(2040), tokens(12, seed=9)
    expected = one_by_one(model, prompt, continuation)
    tree = repeating((-1, 0, 1, 2, 3, 4, 5, 6, 7, 2, 9, 10, 11, 12, 13, 8))
    paths = {}
    for node in (8, 14, 15):
        path = [tree.ids[i] for i in tree.path(node)]
        paths[node] = one_by_one(model, prompt, [*path, 0])[-1]
    for threads in (1, 2, 5):
        model.runner.threads = threads
        handle = model.open(prompt)
        for handles, drafts in (([], []), neighbours(model, 1100)):
            for draft in (Draft.chain(continuation[:11]), tree):
                got = model.score([*handles, handle], [*drafts, draft])[-1].logits
                if draft.is_chain:
                    assert all(torch.equal(got[row], expected[row]) for row in range(12)), threads
                else:
                    assert all(torch.equal(got[node + 1], paths[node]) for node in paths), threads
                model.commit([*handles, handle], [()] * (len(handles) + 1))
        model.close(handle)


def test_stretches_of_keys_sum_to_attention_over_all() -> None:
    prompt, draft = tokens(2040), Draft.chain(tokens(11, seed=9))
    compiled, other = (decoder(f"float32-{runner}") for runner in ("compiled", "torch"))
    got, expected = (model.score([model.open(prompt)], [draft])[0].logits for model in (compiled, other))
    assert torch.allclose(got, expected, rtol=1e-4, atol=1e-4)
