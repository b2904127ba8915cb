"""``python -P to_gguf.py LLAMA_CPP CHECKPOINT OUT TYPE``: llama.cpp's converter, which has no module name to run.

``LLAMA_CPP`` is the folder of llama.cpp's source, and ``TYPE`` is f32, f16 or bf16.
"""

import sys
from typing import Any


def convert(source: str, checkpoint: str, out: str, kind: str) -> None:
    """Writes ``checkpoint`` as a GGUF file. A tokenizer that llama.cpp does not know gets the name "gpt-2"."""
    sys.path.insert(0, source)
    import convert_hf_to_gguf  # type: ignore[import-not-found]
    from conversion.base import TextModel  # type: ignore[import-not-found]

    recognize = TextModel.get_vocab_base_pre

    def recognize_or_default(self: Any, tokenizer: Any) -> str:
        try:
            return str(recognize(self, tokenizer))
        except NotImplementedError:
            return "gpt-2"

    TextModel.get_vocab_base_pre = recognize_or_default
    sys.argv = ["convert_hf_to_gguf.py", checkpoint, "--outfile", out, "--outtype", kind]
    convert_hf_to_gguf.main()


if __name__ == "__main__":
    convert(*sys.argv[1:])
