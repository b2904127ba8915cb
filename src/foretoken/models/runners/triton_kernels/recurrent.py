"""Recurrent token mixers: gated DeltaNet (2412.06464), Mamba-2 (2405.21060) and short convolutions.

A program walks the steps of one sequence in their order (``models/state/replay.py``), for some columns of one head. Its
part of the state stays in registers; it is read at a step that starts from a stored state, and written if a later pass
needs it. Prompts, drafts, replays and plain decoding run the same program, a row at a time, so they compute the same
bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from foretoken.models.runners.triton_kernels.steps import RecurrentLayer, Steps

TILE = 1024  # elements of the state of one program, which is one warp, so that no thread waits
COLUMNS = 1024  # channels of one program that copies or convolves
NOTHING = tl.constexpr(-(2**31))  # as in ``replay``
OWN, ZEROS = tl.constexpr(-1), tl.constexpr(-2)  # as in ``replay``


@triton.jit
def _log(logs, log_rows, sequence, layer, INPUTS: tl.constexpr):
    start = layer * tl.load(log_rows + sequence) * INPUTS
    return tl.load(logs + sequence).to(tl.pointer_type(tl.float32)) + start


@triton.jit
def _input(fresh, kept, code, inside):
    """Returns inputs of an encoded row, float32: from the pass, from the log, or zeros before the first row."""
    new = tl.load(fresh, mask=inside & (code >= 0), other=0.0).to(tl.float32)
    old = tl.load(kept, mask=inside & (code < 0) & (code > NOTHING), other=0.0)
    return tl.where(code >= 0, new, old)


@triton.jit(do_not_specialize=["layer"])
def _prepare(
    rows, gates, counts, sequences, inputs, logs, log_rows, conv, conv_bias, decay, step_bias, prepared,
    layer, step_factor, query_factor,
    TAPS: tl.constexpr, WIDTH: tl.constexpr, GATES: tl.constexpr, GATE_ROOM: tl.constexpr, CHANNELS: tl.constexpr,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BIAS: tl.constexpr, DELTA: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Convolves a head of queries, keys or values of a step; for one of values also its decay and strength."""
    step, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if step < tl.load(counts):
        INPUTS: tl.constexpr = GATE_ROOM + CHANNELS
        log = _log(logs, log_rows, tl.load(sequences + step), layer, INPUTS)
        own = prepared + step * (2 * VALUE_HEADS + CHANNELS)
        value_head = head - 2 * KEY_HEADS
        at = tl.arange(0, BLOCK)
        inside = at < tl.where(value_head < 0, KEY_DIM, VALUE_DIM)
        channel = at + tl.where(value_head < 0, head * KEY_DIM, 2 * KEY_HEADS * KEY_DIM + value_head * VALUE_DIM)
        total = tl.zeros([BLOCK], tl.float32)
        if BIAS:
            total += tl.load(conv_bias + channel, mask=inside, other=0.0)
        for tap in tl.static_range(TAPS):
            code = tl.broadcast_to(tl.load(inputs + step * TAPS + tap), [BLOCK])
            kept = log + (-1 - code) * INPUTS + GATE_ROOM + channel
            numbers = _input(rows + code * WIDTH + channel, kept, code, inside)
            total += tl.load(conv + tap * CHANNELS + channel, mask=inside, other=0.0) * numbers
        active = total / (1.0 + tl.exp(-total))
        if DELTA:  # queries and keys have unit length
            scale = 1.0 / tl.sqrt(tl.sum(active * active, 0) + 1e-6)
            scale = tl.where(head < KEY_HEADS, scale * query_factor, tl.where(value_head < 0, scale, 1.0))
            active = active * scale
        tl.store(own + 2 * VALUE_HEADS + channel, active, mask=inside)
        if value_head >= 0:
            row = tl.load(inputs + step * TAPS)
            gate, old = gates + row * GATES + value_head, log + (-1 - row) * INPUTS + value_head
            first = _input(gate, old, row, row > NOTHING)
            speed = first
            if DELTA:
                speed = _input(gate + VALUE_HEADS, old + VALUE_HEADS, row, row > NOTHING)
            speed = speed * step_factor + tl.load(step_bias + value_head)
            grown = tl.exp(tl.minimum(speed, 20.0))
            above = 1.0 + grown
            # log(1 + grown) with the digits that the sum has lost; the divisor is not 0.
            softplus = grown * tl.log(above) / tl.where(above == 1.0, 1.0, above - 1.0)
            softplus = tl.where(above == 1.0, grown, tl.where(speed > 20.0, speed, softplus))
            tl.store(own + value_head, tl.exp(tl.load(decay + value_head) * softplus))
            if DELTA:
                tl.store(own + VALUE_HEADS + value_head, 1.0 / (1.0 + tl.exp(-first)))
            else:
                tl.store(own + VALUE_HEADS + value_head, softplus)


@triton.jit
def _step(
    step, prepared, sources, targets, saves, inputs, queries, keys, values, head, of_keys, of_values,
    TAPS: tl.constexpr, WIDTH: tl.constexpr, VALUE_HEADS: tl.constexpr,
):  # fmt: skip
    """Returns a step's inputs: indices of states, the row of the pass, query, key, value, decay and strength."""
    x = prepared + step * WIDTH
    source, target, save = tl.load(sources + step), tl.load(targets + step), tl.load(saves + step)
    row = tl.load(inputs + step * TAPS)
    query, key = tl.load(x + queries, mask=of_keys, other=0.0), tl.load(x + keys, mask=of_keys, other=0.0)
    value = tl.load(x + values, mask=of_values, other=0.0)
    return source, target, save, row, query, key, value, tl.load(x + head), tl.load(x + VALUE_HEADS + head)


@triton.jit(do_not_specialize=["layer"])
def _recur(
    prepared, firsts, ends, states, sources, targets, saves, inputs, copies, skip, mixed, layer,
    TAPS: tl.constexpr, CHANNELS: tl.constexpr,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    DELTA: tl.constexpr, SKIP: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_VALUES: tl.constexpr,
):  # fmt: skip
    """Applies all steps of a sequence to some columns of a head's state, [values, keys]."""
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    STATE: tl.constexpr = VALUE_HEADS * VALUE_DIM * KEY_DIM
    WIDTH: tl.constexpr = 2 * VALUE_HEADS + CHANNELS
    column = tl.program_id(2) * BLOCK_VALUES + tl.arange(0, BLOCK_VALUES)
    at = tl.arange(0, BLOCK_KEYS)
    of_values, of_keys = column < VALUE_DIM, at < KEY_DIM
    used = of_values[:, None] & of_keys[None, :]
    tile = (head * VALUE_DIM + column)[:, None] * KEY_DIM + at[None, :]
    # As well aligned as ``copies``: with another alignment loads would have another layout, and sums another order.
    tile_of_layer = layer.to(tl.int64) * STATE + tile
    own = tl.multiple_of(tl.load(states + sequence).to(tl.pointer_type(tl.float32)), 16) + tile_of_layer
    spare = copies + sequence * STATE + tile
    queries = 2 * VALUE_HEADS + head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM + at
    keys = queries + KEY_HEADS * KEY_DIM
    values = 2 * VALUE_HEADS + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + column
    state = tl.zeros([BLOCK_VALUES, BLOCK_KEYS], tl.float32)
    first, end = tl.load(firsts + sequence), tl.load(ends + sequence)
    source, target, save, row, query, key, value, decay, strength = _step(
        first, prepared, sources, targets, saves, inputs, queries, keys, values, head, of_keys, of_values,
        TAPS, WIDTH, VALUE_HEADS,
    )  # fmt: skip
    for step in range(first, end):
        following = tl.minimum(step + 1, end - 1)  # is loaded meanwhile
        source_, target_, save_, row_, query_, key_, value_, decay_, strength_ = _step(
            following, prepared, sources, targets, saves, inputs, queries, keys, values, head, of_keys, of_values,
            TAPS, WIDTH, VALUE_HEADS,
        )  # fmt: skip
        if source == OWN:
            state = tl.load(own, mask=used, other=0.0)
        if source == ZEROS:
            state = tl.zeros([BLOCK_VALUES, BLOCK_KEYS], tl.float32)
        if source >= 0:
            state = tl.load(spare + source * tl.num_programs(0) * STATE, mask=used, other=0.0)
        state = state * decay
        change = value
        if DELTA:
            change = value - tl.sum(state * key[None, :], 1)
        state = state + (change * strength)[:, None] * key[None, :]
        if row >= 0:
            out = tl.sum(state * query[None, :], 1)
            if SKIP:
                out = out + tl.load(skip + head) * value
            tl.store(mixed + (row * VALUE_HEADS + head) * VALUE_DIM + column, out, mask=of_values)
        if target == OWN:
            tl.store(own, state, mask=used)
        if target >= 0:
            tl.store(spare + target * tl.num_programs(0) * STATE, state, mask=used)
            tl.debug_barrier()  # other threads of the program may read it
        if save != 0:
            snapshot = tl.multiple_of(save.to(tl.pointer_type(tl.float32)), 16)
            tl.store(snapshot + tile_of_layer, state, mask=used)
        source, target, save, row = source_, target_, save_, row_
        query, key, value, decay, strength = query_, key_, value_, decay_, strength_


@triton.jit(do_not_specialize=["layer"])
def _convolve(
    rows, counts, sequences, inputs, logs, log_rows, conv, conv_bias, result, layer,
    TAPS: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Convolves products of two halves of the inputs, and multiplies them by the output's gate."""
    step = tl.program_id(0).to(tl.int64)
    row = tl.load(inputs + step * TAPS)
    if (step < tl.load(counts)) & (row >= 0):
        log = _log(logs, log_rows, tl.load(sequences + step), layer, 2 * CHANNELS)
        channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = channel < CHANNELS
        total = tl.zeros([BLOCK], tl.float32)
        if BIAS:
            total += tl.load(conv_bias + channel, mask=inside, other=0.0)
        for tap in tl.static_range(TAPS):
            code = tl.broadcast_to(tl.load(inputs + step * TAPS + tap), [BLOCK])
            fresh, kept = rows + code * WIDTH + channel, log + (-1 - code) * 2 * CHANNELS + channel
            numbers = _input(fresh, kept, code, inside) * _input(fresh + CHANNELS, kept + CHANNELS, code, inside)
            total += tl.load(conv + tap * CHANNELS + channel, mask=inside, other=0.0) * numbers
        gate = tl.load(rows + row * WIDTH + 2 * CHANNELS + channel, mask=inside, other=0.0).to(tl.float32)
        tl.store(result + row * CHANNELS + channel, (total * gate).to(result.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["layer"])
def _keep(
    rows, gates, counts, moved, moved_of, moved_to, moved_stride, logs, log_rows, layer,
    WIDTH: tl.constexpr, GATES: tl.constexpr, GATE_ROOM: tl.constexpr, INPUTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copies inputs of a row to a log."""
    move = tl.program_id(0).to(tl.int64)
    if move < tl.load(counts + 1):
        code = tl.broadcast_to(tl.load(moved + move), [BLOCK])
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside, gating = at < INPUTS, at < GATES
        log = _log(logs, log_rows, tl.load(moved_of + move), layer, INPUTS)
        channel = tl.maximum(at - GATE_ROOM, 0)
        numbers = _input(rows + code * WIDTH + channel, log + (-1 - code) * INPUTS + at, code, inside)
        if GATE_ROOM > 0:
            fresh = tl.load(gates + code * GATES + at, mask=gating & (code >= 0), other=0.0).to(tl.float32)
            numbers = tl.where((code >= 0) & (at < GATE_ROOM), fresh, numbers)
        start = layer * tl.load(moved_stride + move) * INPUTS
        tl.store(tl.load(moved_to + move).to(tl.pointer_type(tl.float32)) + start + at, numbers, mask=inside)


@triton.jit
def _gate(
    mixed, rows, norm, result, gate_factor, eps,
    WIDTH: tl.constexpr, GATE_AT: tl.constexpr, SIZE: tl.constexpr, NORMED: tl.constexpr, FIRST: tl.constexpr,
    BY_GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Norms one group of elements of a row, before or after multiplication by their gates."""
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, BLOCK)
    inside = at < SIZE
    place = (row * tl.num_programs(1) + group) * SIZE + at
    numbers = tl.load(mixed + place, mask=inside, other=0.0)
    gate = tl.load(rows + row * WIDTH + GATE_AT + group * SIZE + at, mask=inside, other=0.0).to(tl.float32)
    gate = gate * gate_factor
    gate = gate / (1.0 + tl.exp(-gate))
    if not FIRST:
        numbers = numbers * gate
    if NORMED:
        scale = 1.0 / tl.sqrt(tl.sum(numbers * numbers, 0) / SIZE + eps)
        numbers = numbers * scale * tl.load(norm + group * SIZE * BY_GROUP + at, mask=inside, other=0.0)
    if FIRST:
        numbers = numbers * gate
    tl.store(result + place, numbers.to(result.dtype.element_ty), mask=inside)


def mix(layer: RecurrentLayer, rows: Tensor, gates: Tensor, steps: Steps) -> Tensor:
    """Computes a recurrent layer's output before its last matrix, and changes states and logs.

    Args:
        rows: [R, channels of the inputs, then the output's gate].
        gates: gates of heads, [R, 2 * heads] of DeltaNet, [R, heads] of Mamba-2, unused for a convolution.
        steps: the steps of the pass.

    Returns:
        [R, out], in the dtype of ``rows``; zeros for rows of no step.
    """
    s, width = layer.sizes, rows.shape[1]
    assert rows.is_contiguous() and gates.is_contiguous()
    taps, inputs = layer.conv.shape[0], s.inputs
    room = inputs - (1 + s.paired) * s.channels
    log = steps.logs, steps.log_rows
    if layer.kind == "convolution":
        result = rows.new_zeros((len(rows), s.out))
        _convolve[(len(steps.sources), triton.cdiv(s.channels, COLUMNS))](
            rows, steps.counts, steps.sequences, steps.inputs, *log, layer.conv,
            layer.conv if layer.conv_bias is None else layer.conv_bias, result, layer.number,
            TAPS=taps, WIDTH=width, CHANNELS=s.channels, BIAS=layer.conv_bias is not None, BLOCK=COLUMNS,
        )  # fmt: skip
    else:
        result = _gated(layer, _changed(layer, rows, gates, steps), rows)
    _keep[(len(steps.moved), triton.cdiv(inputs, COLUMNS))](
        rows, gates, steps.counts, steps.moved, steps.moved_of, steps.moved_to, steps.moved_stride, *log, layer.number,
        WIDTH=width, GATES=gates.shape[1] if room else 0, GATE_ROOM=room, INPUTS=inputs, BLOCK=COLUMNS,
    )  # fmt: skip
    return result


def _changed(layer: RecurrentLayer, rows: Tensor, gates: Tensor, steps: Steps) -> Tensor:
    """Changes the states. Returns their addition to each row, float32 [R, out]; zeros for rows of no step."""
    s, count, sequences = layer.sizes, len(steps.sources), len(steps.states)
    sizes = {"KEY_HEADS": s.key_heads, "VALUE_HEADS": s.value_heads, "KEY_DIM": s.key_dim, "VALUE_DIM": s.value_dim}
    sizes |= {"TAPS": layer.conv.shape[0], "CHANNELS": s.channels, "DELTA": layer.kind == "delta"}
    prepared = torch.empty((count, 2 * s.value_heads + s.channels), dtype=torch.float32, device=rows.device)
    _prepare[(count, 2 * s.key_heads + s.value_heads)](
        rows, gates, steps.counts, steps.sequences, steps.inputs, steps.logs, steps.log_rows, layer.conv,
        layer.conv if layer.conv_bias is None else layer.conv_bias, layer.decay, layer.step_bias, prepared,
        layer.number, s.step_factor, s.key_dim**-0.5,
        WIDTH=rows.shape[1], GATES=gates.shape[1], GATE_ROOM=s.inputs - s.channels, BIAS=layer.conv_bias is not None,
        BLOCK=triton.next_power_of_2(max(s.key_dim, s.value_dim)), num_warps=1, **sizes,
    )  # fmt: skip
    keys = triton.next_power_of_2(s.key_dim)
    values = max(1, min(triton.next_power_of_2(s.value_dim), TILE // keys))
    copies = torch.empty((steps.copies, sequences, s.state), dtype=torch.float32, device=rows.device)
    mixed = torch.zeros((len(rows), s.out), dtype=torch.float32, device=rows.device)
    _recur[(sequences, s.value_heads, triton.cdiv(s.value_dim, values))](
        prepared, steps.firsts, steps.ends, steps.states, steps.sources, steps.targets, steps.saves, steps.inputs,
        copies if steps.copies else prepared, mixed if layer.skip is None else layer.skip, mixed, layer.number,
        SKIP=layer.skip is not None, BLOCK_KEYS=keys, BLOCK_VALUES=values, num_warps=1, **sizes,
    )  # fmt: skip
    return mixed


def _gated(layer: RecurrentLayer, mixed: Tensor, rows: Tensor) -> Tensor:
    """Norms and gates the state's addition, [R, out]; the result has the dtype of ``rows``."""
    s = layer.sizes
    groups = s.value_heads if layer.kind == "delta" else s.key_heads
    size = s.out // groups
    block = triton.next_power_of_2(size)
    result = torch.empty((len(rows), s.out), dtype=rows.dtype, device=rows.device)
    _gate[(len(rows), groups)](
        mixed, rows, mixed if layer.norm is None else layer.norm, result, s.gate_factor, layer.eps,
        WIDTH=rows.shape[1], GATE_AT=s.channels, SIZE=size, NORMED=layer.norm is not None, FIRST=s.norm_first,
        BY_GROUP=layer.kind == "mamba", BLOCK=block, num_warps=min(8, max(1, block // 512)),
    )  # fmt: skip
    return result
