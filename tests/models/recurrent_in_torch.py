"""A stand-in for the kernels of ``triton_kernels/recurrent.py`` on the CPU, whose addresses are those of the host."""

import ctypes

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.models.runners.triton_kernels.steps import ON, RecurrentLayer, Steps
from foretoken.models.state.replay import NOTHING, NOWHERE, OWN, ZEROS


def mix(layer: RecurrentLayer, rows: Tensor, gates: Tensor, steps: Steps) -> Tensor:
    """See ``recurrent.mix``."""
    s = layer.sizes
    mixed = torch.zeros(len(rows), s.out, device=rows.device)
    if rows.is_meta:
        return mixed.to(rows.dtype)
    fresh = _inputs(layer, rows, gates)
    for sequence, (first, end) in enumerate(zip(steps.firsts.tolist(), steps.ends.tolist(), strict=True)):
        _walk(layer, fresh, steps, sequence, range(first, end), mixed)
    for move in range(int(steps.counts[1])):
        numbers = _row(layer, fresh, steps, int(steps.moved_of[move]), int(steps.moved[move]))
        offset = layer.number * int(steps.moved_stride[move]) * s.inputs
        _floats(int(steps.moved_to[move]), offset, s.inputs).copy_(numbers)
    return _gated(layer, mixed, rows).to(rows.dtype)


def _inputs(layer: RecurrentLayer, rows: Tensor, gates: Tensor) -> Tensor:
    """Returns the inputs of all rows of the pass, as a log keeps them."""
    channels = (1 + layer.sizes.paired) * layer.sizes.channels
    fresh = torch.zeros(len(rows), layer.sizes.inputs)
    if layer.kind != "convolution":
        fresh[:, : gates.shape[1]] = gates
    fresh[:, layer.sizes.inputs - channels :] = rows[:, :channels]
    return fresh


def _floats(address: int, offset: int, count: int) -> Tensor:
    memory = (ctypes.c_float * count).from_address(address + 4 * offset)
    return torch.frombuffer(memory, dtype=torch.float32)


def _row(layer: RecurrentLayer, fresh: Tensor, steps: Steps, sequence: int, code: int) -> Tensor:
    if code >= 0:
        return fresh[code]
    if code == NOTHING:
        return torch.zeros(layer.sizes.inputs)
    place = layer.number * int(steps.log_rows[sequence]) + ~code
    return _floats(int(steps.logs[sequence]), place * layer.sizes.inputs, layer.sizes.inputs)


def _walk(layer: RecurrentLayer, fresh: Tensor, steps: Steps, sequence: int, walked: range, mixed: Tensor) -> None:
    s, codes = layer.sizes, steps.inputs.view(len(steps.sources), -1)
    own, state, copies = None, torch.zeros(()), {}
    if s.state and len(walked):
        own = _floats(int(steps.states[sequence]), layer.number * s.state, s.state)
        own = own.view(s.value_heads, s.value_dim, s.key_dim)
    for step in walked:
        taps = torch.stack([_row(layer, fresh, steps, sequence, code) for code in codes[step].tolist()])
        row = int(codes[step, 0])
        if own is None:
            if row >= 0:
                before, after = taps.chunk(2, 1)
                mixed[row] = (before * after * layer.conv).sum(0)
                if layer.conv_bias is not None:
                    mixed[row] += layer.conv_bias
            continue
        source, target = int(steps.sources[step]), int(steps.targets[step])
        if source != ON:
            state = {OWN: own, ZEROS: torch.zeros_like(own)}[source].clone() if source < 0 else copies[source]
        state, out = _changed(layer, state, taps)
        if row >= 0:
            mixed[row] = out
        if int(steps.saves[step]):
            _floats(int(steps.saves[step]), layer.number * s.state, s.state).copy_(state.flatten())
        if target == OWN:
            own.copy_(state)
        elif target != NOWHERE:
            copies[target] = state


def _changed(layer: RecurrentLayer, state: Tensor, taps: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the state [heads, values, keys] after a step, and what it adds to the row [out]."""
    s, delta = layer.sizes, layer.kind == "delta"
    total = (taps[:, s.inputs - s.channels :] * layer.conv).sum(0)
    channels = F.silu(total if layer.conv_bias is None else total + layer.conv_bias)
    keys = s.key_heads * s.key_dim
    q, k, v = channels.split((keys, keys, s.value_heads * s.value_dim))
    q, k, v = q.view(s.key_heads, -1), k.view(s.key_heads, -1), v.view(s.value_heads, -1)
    if delta:
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
        q = q * s.key_dim**-0.5
    q, k = (x.repeat_interleave(s.value_heads // s.key_heads, 0) for x in (q, k))
    assert layer.decay is not None and layer.step_bias is not None
    at = s.value_heads if delta else 0
    speed = F.softplus(taps[0, at : at + s.value_heads] * s.step_factor + layer.step_bias)
    strength = taps[0, : s.value_heads].sigmoid() if delta else speed
    state = state * (layer.decay * speed).exp()[:, None, None]
    change = v - (state * k[:, None]).sum(-1) if delta else v
    state = state + (change * strength[:, None])[..., None] * k[:, None]
    out = (state * q[:, None]).sum(-1)
    return state, (out if layer.skip is None else out + layer.skip[:, None] * v).flatten()


def _gated(layer: RecurrentLayer, mixed: Tensor, rows: Tensor) -> Tensor:
    s = layer.sizes
    gate = rows[:, (1 + s.paired) * s.channels :].float()
    if layer.kind == "convolution":
        return mixed * gate
    gate = F.silu(gate * s.gate_factor)
    groups = s.value_heads if layer.kind == "delta" else s.key_heads

    def normed(x: Tensor) -> Tensor:
        if layer.norm is None:
            return x
        unit = F.rms_norm(x.view(len(x), groups, -1), (s.out // groups,), None, layer.eps)
        weight = layer.norm if layer.kind == "delta" else layer.norm.view(groups, -1)
        return (unit * weight).flatten(1)

    return normed(mixed) * gate if s.norm_first else normed(mixed * gate)
