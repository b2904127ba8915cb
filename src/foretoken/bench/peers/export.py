"""OpenVINO's form of a checkpoint, made once by optimum-intel and kept."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

from foretoken import zoo
from foretoken.bench.peers.registry import PEERS
from foretoken.core.errors import ModelLoadError


def exported(checkpoint: Path, weights: str = "fp16") -> Path:
    """The folder of ``checkpoint`` for OpenVINO with ``weights`` "fp16" or "int8". Raises ModelLoadError.

    fp16 is what it computes bf16 from: the weights are half of float32's size, and the hint does the rest.
    """
    out = zoo.cache_folder() / "openvino" / f"{checkpoint.name}-{weights}-{_fingerprint(checkpoint)}"
    if (out / "openvino_model.xml").exists():
        return out
    part = out.with_name(out.name + ".partial")
    shutil.rmtree(part, ignore_errors=True)
    part.parent.mkdir(parents=True, exist_ok=True)
    command = [
        str(PEERS["openvino"].python), "-m", "optimum.commands.optimum_cli", "export", "openvino",
        "--model", str(checkpoint), "--task", "text-generation-with-past", "--weight-format", weights, str(part),
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | {"HF_HUB_OFFLINE": "1"}
    )
    if done.returncode or not (part / "openvino_model.xml").exists():
        shutil.rmtree(part, ignore_errors=True)
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ModelLoadError(f"OpenVINO's export of {checkpoint.name} failed: {reason}; `make peers` sets it up again")
    part.rename(out)
    return out


def _fingerprint(checkpoint: Path) -> str:
    """Changes when the checkpoint does, without reading its weights."""
    files = sorted([checkpoint / "config.json", *checkpoint.glob("*.safetensors")])
    facts = [str(checkpoint.absolute()), *(f"{f.name} {f.stat().st_size} {f.stat().st_mtime_ns}" for f in files)]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:12]
