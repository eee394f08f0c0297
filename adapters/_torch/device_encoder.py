"""Encoding where the gradient is: kernels select, code and pack, and the host assembles the container from what they packed.

The bytes are those of the host's encoder. Positions cross as Rice codes, whatever the index codec: the host decodes them and
encodes them anew if it is another one. Values cross as the codes of the value codec if that has kernels, else as float32.
"""

import time
from typing import NamedTuple

import numpy as np
import torch

from grace_ext import registry
from grace_ext._util.rng import Stream
from grace_ext.index.rice import Rice, best_shift
from grace_ext.kernels import rice_decode
from grace_ext.kernels._helpers import MAX_SHIFT
from grace_ext.kernels.rice import quotient_room, remainder_bytes
from grace_ext.pipeline import container
from grace_ext.pipeline.compressor import Compressor
from grace_ext.pipeline.encoded import StageClock

from . import device_values
from .device_values import Source
from .kernels import block_topk, rice, topk
from .mailbox import Outbox, to_device, to_host


class DeviceEncoded(NamedTuple):
    """A container, uint8[m], and what the sender knows about it; see grace_ext.pipeline.encoded.Encoded."""

    blob: np.ndarray
    seconds: dict[str, float]
    index_codec: str | None
    non_finite: bool


def fits(compressor: Compressor) -> bool:
    """Whether gradients can be encoded where they are: top-k without a transform, or all elements with a codec that has kernels."""
    if compressor.lowrank is not None or compressor.transform is not None:
        return False
    if compressor.dense:
        return device_values.find(compressor.value) is not None
    if compressor.sparsifier.name != "topk" or compressor.sparsifier.per == "chunk":
        return False
    return compressor.sparsifier.block <= block_topk.MOST_ELEMENTS


def encode(
    compressor: Compressor,
    gradient: torch.Tensor,
    residual: torch.Tensor | None,
    stream: Stream,
    started: float,
    sizes: tuple[int, ...] | None = None,
) -> DeviceEncoded:
    """Encode gradient + residual, or the gradient where the residual is None.

    sizes: numbers of elements of the tensors that the gradient consists of; None for a single tensor.

    gradient: float32[d], and with a residual overwritten by what the container does not carry (undefined if gradient +
    residual is not finite). The work is queued on the current stream; at the end the host has waited for it.
    """
    container.check_elements(gradient.numel())
    clock = StageClock(started)
    if compressor.dense:
        return _encode_dense(compressor, gradient, residual, stream, clock)
    return _encode_sparse(compressor, gradient, residual, stream, clock, sizes or (gradient.numel(),))


def _non_finite(d: int, clock: StageClock) -> DeviceEncoded:
    return DeviceEncoded(container.pack_non_finite(d), clock.seconds, None, True)


def _encode_dense(compressor, gradient, residual, stream, clock) -> DeviceEncoded:
    d, codec = gradient.numel(), device_values.find(compressor.value)
    sizes = codec.sizes(d)
    if _is_longer_than_raw(sizes, d):
        return _encode_few(compressor, gradient, residual, stream, clock)
    outbox = Outbox({"special": 4, **sizes}, gradient.device)
    remainder = None if residual is None else gradient
    codec.encode(Source(gradient, residual, None, remainder), outbox, outbox.view("special", torch.int32), stream.key())
    fetched = outbox.fetch()
    clock.lap("value")
    if fetched["special"].any():
        return _non_finite(d, clock)
    blob = container.pack(d, d, 0, np.empty(0, np.uint8), compressor.value.id, codec.section(fetched))
    clock.lap("container")
    return DeviceEncoded(blob, clock.seconds, None, False)


def _encode_few(compressor, gradient, residual, stream, clock) -> DeviceEncoded:
    """A dense gradient of so few elements that the host might send them raw: it does all of it."""
    if residual is not None:
        gradient += residual
    values = to_host(gradient).copy()
    encoded = compressor.pack(values.size, None, values, lambda support: values[support], stream)
    if residual is not None and not encoded.non_finite:
        gradient.copy_(to_device(encoded.values - encoded.decoded, gradient.device))
    return DeviceEncoded(encoded.blob, clock.seconds | encoded.seconds, encoded.index_codec, encoded.non_finite)


def _is_longer_than_raw(sizes: dict[str, int], n: int) -> bool:
    """Whether a value section might be longer than float32[n] is, so that the host decides between the two."""
    return sum(sizes.values()) + 8 >= 4 * n  # the parameters have fewer than 8 bytes


def _select(sparsifier, gradient, residual, sizes: tuple[int, ...]) -> topk.Selection:
    if sparsifier.block:
        return block_topk.select_of_blocks(gradient, residual, gradient, sizes, sparsifier)
    if sparsifier.per == "tensor":
        return topk.select_topk_of_parts(gradient, residual, gradient, sizes, sparsifier.count)
    return topk.select_topk(gradient, residual, gradient, sparsifier.count(gradient.numel()))


def _encode_sparse(compressor, gradient, residual, stream, clock, sizes) -> DeviceEncoded:
    d, device = gradient.numel(), gradient.device
    selection = _select(compressor.sparsifier, gradient, residual, sizes)
    clock.lap("select")
    if not selection.finite:
        return _non_finite(d, clock)
    n, remainder = selection.positions.numel(), None if residual is None else gradient
    codec = device_values.find(compressor.value) if n and compressor.index.lossless else None
    if codec is not None and _is_longer_than_raw(codec.sizes(n), n):
        codec = None
    values = selection.bits.view(torch.float32)
    e = best_shift(d, n) if n else MAX_SHIFT  # which leaves no room for quotients that there are not
    sizes = {"remainders": remainder_bytes(n, e), "unary": quotient_room(d, n, e), "bits": 4}
    outbox = Outbox(sizes | (codec.sizes(n) if codec else {"values": 4 * n}), device)
    if n:
        bits = rice.encode(selection.positions, e, outbox.words("remainders"), outbox.words("unary"))
        outbox.view("bits", torch.int32).copy_(bits)
    if codec:
        codec.encode(Source(values, None, selection.positions, remainder), outbox, None, stream.key())
    else:
        outbox.view("values", torch.float32).copy_(values)
    fetched = outbox.fetch()
    fetched["unary"] = fetched["unary"][: (int(fetched["bits"].view(np.int32)[0]) + 7) // 8]
    clock.lap("value")
    if codec is None:
        return _pack_on_host(compressor, gradient, remainder, selection, e, fetched, stream, clock)
    index_id, index_section = _index_section(compressor, d, n, e, fetched, stream)
    clock.lap("index")
    blob = container.pack(d, n, index_id, index_section, compressor.value.id, codec.section(fetched))
    clock.lap("container")
    return DeviceEncoded(blob, clock.seconds, registry.by_id("index", index_id).name, False)


def _index_section(compressor, d, n, e, fetched, stream) -> tuple[int, np.ndarray]:
    """The id and the section of the positions, which have crossed as Rice codes."""
    if compressor.index.name == Rice.name:
        section = np.concatenate([np.array([e], np.uint8), fetched["remainders"], fetched["unary"]])
        if section.size <= 4 * n:
            return Rice.id, section
    index_id, section, _ = compressor.encode_index(_positions(d, n, e, fetched), d, stream)
    return index_id, section


def _positions(d: int, n: int, e: int, fetched) -> np.ndarray:
    """The positions, uint32[n], that have crossed as Rice codes."""
    positions = np.empty(n, np.uint32)
    rice_decode(fetched["remainders"], fetched["unary"], d, e, positions)
    return positions


def _pack_on_host(compressor, gradient, remainder, selection, e, fetched, stream, clock) -> DeviceEncoded:
    """For value codecs without kernels, and for index codecs that rebuild another support than the given one."""
    d, device = gradient.numel(), gradient.device
    indices = _positions(d, selection.positions.numel(), e, fetched)
    encoded = compressor.pack(
        d,
        indices,
        fetched["values"].view(np.float32),
        lambda support: to_host(gradient[to_device(support.view(np.int32), device).long()]),
        stream,
    )
    started = time.perf_counter()
    if remainder is not None:
        support = to_device(encoded.support.view(np.int32), device).long()
        remainder[support] = to_device(encoded.values - encoded.decoded, device)
    seconds = clock.seconds | encoded.seconds
    seconds["select"] = clock.seconds["select"]
    seconds["residual"] += time.perf_counter() - started
    return DeviceEncoded(encoded.blob, seconds, encoded.index_codec, False)
