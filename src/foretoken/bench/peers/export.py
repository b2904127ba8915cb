"""Exports a checkpoint to OpenVINO's format with optimum-intel, and caches it."""

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
    """Returns the folder of ``checkpoint`` in OpenVINO's format with ``weights`` "fp16" or "int8".

    fp16 files are used for bf16 inference, which the inference-precision hint selects. Raises ModelLoadError.
    """
    out = zoo.cache_folder() / "openvino" / f"{checkpoint.name}-{weights}-{_fingerprint(checkpoint)}"
    if (out / "openvino_model.xml").exists():
        return out
    part = out.with_name(out.name + ".partial")
    shutil.rmtree(part, ignore_errors=True)
    part.parent.mkdir(parents=True, exist_ok=True)
    command = [
        str(PEERS["openvino"].python),
        "-m",
        "optimum.commands.optimum_cli",
        "export",
        "openvino",
        "--model",
        str(checkpoint),
        "--task",
        "text-generation-with-past",
        "--weight-format",
        weights,
        str(part),
    ]
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
    """Returns a hash that changes with the checkpoint, without reading its weights."""
    files = sorted([checkpoint / "config.json", *checkpoint.glob("*.safetensors")])
    facts = [str(checkpoint.absolute()), *(f"{f.name} {f.stat().st_size} {f.stat().st_mtime_ns}" for f in files)]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:12]
