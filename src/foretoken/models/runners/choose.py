"""Chooses the runner for a device and a set of weights."""

import functools
import logging
from collections.abc import Iterable

import torch

from foretoken.core.errors import InvalidRequest
from foretoken.core.native.build import KernelsDisabled, KernelsUnavailable
from foretoken.models.families.architecture import Architecture
from foretoken.models.formats.weights import Ends, Entry, LayerWeights
from foretoken.models.runners.base import Runner
from foretoken.models.runners.cuda.runner import CudaRunner
from foretoken.models.runners.native.cache import WeightCache
from foretoken.models.runners.native.runner import NativeRunner
from foretoken.models.runners.native.support import packs, refuse_int8_latents
from foretoken.models.runners.torch_runner import TorchRunner
from foretoken.models.runners.triton_kernels import has_kernels

_log = logging.getLogger(__name__)


def build_runner(
    architecture: Architecture,
    layers: Iterable[LayerWeights],
    ends: Ends,
    dtype: torch.dtype,
    device: torch.device,
    entry: Entry | None = None,
    cache: WeightCache | None = None,
    weight_format: str = "raw",
    kv_cache_dtype: str = "auto",
) -> Runner:
    """Returns the fastest runner for this model on this device.

    Raises InvalidRequest if weights cannot be packed on this device, in this dtype or on this processor, or the model
    has recurrent layers or a KV cache of another dtype and there are no kernels for it.
    layers: weights of each layer. They are read one layer at a time, so that only one layer is in memory twice, and
    again from the start if the compiled kernels do not support them.
    """
    check_packed(weight_format, dtype, device)
    not_compiled = f"the device is {device.type}"
    if device.type == "cpu":
        try:
            compress = packs(architecture, dtype, weight_format)
            return NativeRunner(architecture, layers, ends, dtype, entry, compress, cache, kv_cache_dtype)
        except KernelsUnavailable as reason:
            fall_back(weight_format, reason)
            not_compiled = str(reason)
    if architecture.recurrent_layers and not has_kernels(device):
        raise InvalidRequest(_no_kernels(architecture, not_compiled))
    if has_kernels(device):
        refuse_int8_latents(architecture, kv_cache_dtype)
        return CudaRunner(architecture, layers, ends, dtype, device, entry, kv_cache_dtype=kv_cache_dtype)
    check_cache_dtype(kv_cache_dtype, dtype, not_compiled)
    runner = TorchRunner(architecture, layers, ends, dtype, device, entry)
    runner.not_compiled = not_compiled
    return runner


def _no_kernels(architecture: Architecture, reason: str) -> str:
    return (
        f"the recurrent layers of a {architecture.family} are computed by kernels alone, compiled ones on CPUs and "
        f"Triton's on NVIDIA GPUs from Ampere on, and neither run here: {reason}; pass device='cpu', where the kernels "
        "run on most processors (foretoken info says whether on this one)"
    )


def check_packed(weight_format: str, dtype: torch.dtype, device: torch.device) -> None:
    """Raises InvalidRequest if weights of this dtype are never packed on this device."""
    if weight_format == "packed" and (device.type != "cpu" or dtype != torch.bfloat16):
        raise InvalidRequest(
            f"weight_format='packed' holds bfloat16 weights on a CPU, not {dtype} on {device.type}; use 'auto'"
        )


def check_cache_dtype(kv_cache_dtype: str, dtype: torch.dtype, not_compiled: str) -> None:
    """Raises InvalidRequest for a KV cache of another dtype than the model's, which torch operators lack."""
    if kv_cache_dtype != "auto" and str(dtype) != f"torch.{kv_cache_dtype}":
        raise InvalidRequest(
            f"kv_cache_dtype={kv_cache_dtype!r} needs the compiled kernels, which do not compute this {dtype} model: "
            f"{not_compiled}; leave it out"
        )


def fall_back(weight_format: str, reason: KernelsUnavailable) -> None:
    """Reports the reason that torch operators replace the compiled kernels, unless these are switched off.

    Raises InvalidRequest if ``weight_format`` needs the kernels.
    """
    if weight_format == "packed":
        raise InvalidRequest(f"weight_format='packed' needs the compiled kernels: {reason}; use 'auto'") from reason
    if not isinstance(reason, KernelsDisabled):
        report_fallback(str(reason))


@functools.cache
def report_fallback(reason: str) -> None:
    """Warns once per process that the compiled kernels are not used, on standard error unless logging is set up."""
    _log.warning("torch operators compute the model, several times slower than the compiled kernels: %s", reason)


def cached_runner(
    architecture: Architecture,
    dtype: torch.dtype,
    device: torch.device,
    cache: WeightCache | None,
    kv_cache_dtype: str = "auto",
) -> Runner | None:
    """Returns a runner on the packed weights in ``cache``; None if it has none for this device."""
    if cache is None or device.type != "cpu":
        return None
    try:
        return NativeRunner.cached(architecture, dtype, cache, kv_cache_dtype)
    except KernelsUnavailable:
        return None
