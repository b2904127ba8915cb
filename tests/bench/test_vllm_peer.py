"""The arguments and environment of vLLM's process. vLLM itself is not needed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from foretoken.bench.peers import vllm as vllm_peer
from foretoken.bench.peers.protocol import ApiRequest, Setup
from foretoken.bench.peers.vllm import speculation


@pytest.mark.parametrize(
    ("setup", "expected"),
    [
        (Setup("vllm", "plain", "t"), None),
        (
            Setup("vllm", "draft_model", "t", "d", depth=4, options=(("tree", '"ranked"'),)),
            {"method": "draft_model", "model": "d", "num_speculative_tokens": 4},
        ),
        (
            Setup("vllm", "ngram", "t", depth=2, options=(("prompt_lookup_max", "3"),)),
            {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1, "prompt_lookup_max": 3},
        ),
        (
            Setup("vllm", "eagle3", "t", "h", depth=8, options=(("parallel_drafting", "true"),)),
            {"method": "eagle3", "model": "h", "num_speculative_tokens": 8, "parallel_drafting": True},
        ),
    ],
    ids=lambda value: value.method if isinstance(value, Setup) else "",
)
def test_a_method_has_vllms_keys(setup: Setup, expected: dict[str, object] | None) -> None:
    assert speculation(setup) == expected


@pytest.mark.parametrize("left, ends", [(True, SystemExit), (False, RuntimeError)])
def test_a_step_that_fails_ends_the_process_if_requests_are_left(
    monkeypatch: pytest.MonkeyPatch, left: bool, ends: type[BaseException]
) -> None:
    """They would never finish, and every later request would wait for them."""

    class Broken:
        llm_engine = SimpleNamespace(has_unfinished_requests=lambda: left)

        def get_metrics(self) -> list[object]:
            return []

        def generate(self, *arguments: object, **options: object) -> None:
            raise RuntimeError("max(): expected a dimension")

    vllm = SimpleNamespace(__version__="0", SamplingParams=dict)
    monkeypatch.setattr(vllm_peer, "engine", lambda setup, config, **options: (Broken(), vllm))
    complete, _ = vllm_peer.load_api(Setup("vllm", "plain", "t"))
    with pytest.raises(ends, match="expected a dimension"):
        complete(ApiRequest([{"prompt": "a"}]))
