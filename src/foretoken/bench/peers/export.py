"""Converts a checkpoint into the formats of peers with their own tools, and caches the results."""

import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from gguf.constants import LlamaFileType

from foretoken import zoo
from foretoken.bench.peers import llamacpp
from foretoken.bench.peers.registry import PEERS
from foretoken.core.errors import ModelLoadError
from foretoken.core.files import atomic_directory, atomic_file
from foretoken.models.formats.gguf import is_gguf
from foretoken.models.formats.gguf.header import Header

CONVERTER = Path(__file__).with_name("to_gguf.py")


def openvino(checkpoint: Path, weights: str = "bf16") -> Path:
    """Returns the folder of ``checkpoint`` in OpenVINO's format, exported by optimum-intel.

    Args:
        checkpoint: The folder of a checkpoint.
        weights: "bf16", "int8", or "int4-g64" with another number for groups of other sizes. bf16 inference uses fp16
            files, since the inference-precision hint selects it.

    Raises:
        ModelLoadError: The export failed.
    """
    out = zoo.cache_folder() / "openvino" / f"{checkpoint.name}-{weights}-{_fingerprint(checkpoint)}"
    if (out / "openvino_model.xml").exists():
        return out
    scheme, _, group = weights.partition("-g")
    options = ["--weight-format", {"bf16": "fp16"}.get(scheme, scheme)]
    if group:
        options += ["--group-size", group, "--group-size-fallback", "adjust", "--sym"]
    command = [str(PEERS["openvino"].python), "-m", "optimum.commands.optimum_cli", "export", "openvino"]
    command += ["--model", str(checkpoint), "--task", "text-generation-with-past", *options]
    with atomic_directory(out) as part:
        _run([*command, str(part)], f"OpenVINO's export of {checkpoint.name}", part / "openvino_model.xml")
    return out


def gguf(checkpoint: Path, kind: str) -> Path:
    """Returns ``checkpoint`` as a GGUF file, written by llama.cpp's converter and ``llama-quantize``.

    Args:
        checkpoint: The folder of a checkpoint. A GGUF file is returned as it is.
        kind: A file type of llama.cpp, such as "BF16" or "Q4_K_M".

    Raises:
        ModelLoadError: llama.cpp is not set up, or does not convert this checkpoint.
    """
    if is_gguf(checkpoint):
        return checkpoint
    out = zoo.cache_folder() / "gguf" / f"{checkpoint.name}-{_fingerprint(checkpoint)}-{kind}.gguf"
    if out.exists():
        return out
    place = PEERS["llamacpp"].place
    if not (place / llamacpp.BUILD / "bin" / "llama-quantize").exists():
        raise ModelLoadError(f"llama.cpp's tools, which write GGUF files, are not in {place}; `make peers` builds them")
    out.parent.mkdir(parents=True, exist_ok=True)
    task = f"llama.cpp's conversion of {checkpoint.name} to {kind}"
    with atomic_file(out) as part:
        if kind in ("F32", "F16", "BF16"):
            convert = [sys.executable, "-P", str(CONVERTER), str(place / "source")]
            _run([*convert, str(checkpoint), str(part), kind.lower()], task, part)
        else:
            quantize = str(place / llamacpp.BUILD / "bin" / "llama-quantize")
            _run([quantize, str(gguf(checkpoint, "BF16")), str(part), kind], task, part)
    return out


def file_type(file: Path) -> str:
    """Returns the type that a GGUF file says it has, such as "Q4_K_M", or its name. Raises ModelLoadError."""
    try:
        name = LlamaFileType(Header.read(file).metadata.get("general.file_type", LlamaFileType.GUESSED)).name
    except ValueError:
        name = "GUESSED"
    return file.stem if name == "GUESSED" else name.removeprefix("MOSTLY_").removeprefix("ALL_")


def _run(command: Sequence[str], task: str, made: Path) -> None:
    """Runs a tool. Raises ModelLoadError with its last line if it fails or does not write ``made``."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, env=environment)
    if done.returncode or not made.exists():
        reason = ((done.stderr.strip() or done.stdout.strip()).splitlines() or ["no reason given"])[-1]
        raise ModelLoadError(f"{task} failed: {reason}; `make peers` sets the tool up again")


def _fingerprint(checkpoint: Path) -> str:
    """Returns a hash that changes with the checkpoint, without reading its weights."""
    files = sorted([checkpoint / "config.json", *checkpoint.glob("*.safetensors")])
    facts = [str(checkpoint.absolute()), *(f"{f.name} {f.stat().st_size} {f.stat().st_mtime_ns}" for f in files)]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:12]
