"""The server in front of an encoder-decoder: the prompt is what the encoder reads."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.models.seq2seq.tiny import save
from tests.serve.conftest import running

from foretoken import LLM, SamplingParams

PROMPT = "def main(args):\n    return args\n"


@pytest.fixture(scope="module")
def served(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[openai.OpenAI, Path]]:
    folder, end = tmp_path_factory.mktemp("t5"), tokenizer.eos_token_id
    ids = {"eos_token_id": end, "pad_token_id": end, "decoder_start_token_id": end, "vocab_size": len(tokenizer)}
    for name, changes in (("target", {}), ("draft", {"d_ff": 48})):
        save("t5", folder / name, **ids, **changes)
        tokenizer.save_pretrained(folder / name)
    llm = LLM(folder / "target", folder / "draft", dtype="float32", methods=("ngram",))
    with running(llm) as server, server.client as client:
        yield client, folder


def test_whole_streamed_and_counted(served: tuple[openai.OpenAI, Path], tokenizer: Any) -> None:
    client, folder = served
    request: dict[str, Any] = {"model": "foretoken", "prompt": PROMPT, "temperature": 0, "max_tokens": 20}
    request["extra_body"] = {"ignore_eos": True}
    whole = client.completions.create(**request)
    alone = LLM(folder / "target", dtype="float32").generate(
        PROMPT, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    )
    assert whole.choices[0].text == alone[0].outputs[0].text
    assert whole.usage is not None and whole.usage.prompt_tokens == len(tokenizer(PROMPT)["input_ids"])
    assert whole.usage.completion_tokens == 20
    chunks = list(client.completions.create(**request, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    request["extra_body"] = {"ignore_eos": True, "speculative_method": "ngram"}
    several = client.completions.create(**{**request, "prompt": [PROMPT, "x"], "n": 2, "seed": 3, "temperature": 1})
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]


def test_unsupported_requests_are_refused(served: tuple[openai.OpenAI, Path]) -> None:
    client, _ = served
    with pytest.raises(openai.BadRequestError, match="prompt_logprobs"):
        client.completions.create(model="foretoken", prompt=PROMPT, echo=True, logprobs=1)
    with pytest.raises(openai.BadRequestError, match="encoder reads at most"):
        client.completions.create(model="foretoken", prompt=[5] * 5000)
    with pytest.raises(openai.BadRequestError, match="chat template"):
        client.chat.completions.create(model="foretoken", messages=[{"role": "user", "content": "x"}])
