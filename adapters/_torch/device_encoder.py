"""Encoding where the gradient is: kernels select, code and pack, and the host assembles the container from what they packed.

The bytes are those of the host's encoder. Positions cross as Rice codes, whatever the index codec: the host decodes them and
encodes them anew if it is another one. Values cross as the codes of the value codec if that has kernels, else as float32; those of
an index codec that rebuilds another support once the host has told the device where that is.
"""

import dataclasses
from typing import NamedTuple

import numpy as np
import torch

from grace_ext import registry
from grace_ext._util.rng import Stream
from grace_ext.index.keys import Keys
from grace_ext.index.raw import RawIndex
from grace_ext.index.rice import Rice, best_shift
from grace_ext.kernels import rice_decode
from grace_ext.kernels._helpers import MAX_SHIFT
from grace_ext.kernels.rice import quotient_room, remainder_bytes
from grace_ext.pipeline import container
from grace_ext.pipeline.compressor import Compressor
from grace_ext.pipeline.encoded import StageClock, as_received
from grace_ext.pipeline.encoder import HUGE
from grace_ext.value.raw import RawValue

from . import device_decoder, device_selection, device_transform, device_values
from .device_codec import Source
from .kernels import rice
from .kernels.parts import Parts
from .mailbox import Outbox, to_device, to_host
from .torch_place import MAGNITUDE


class DeviceEncoded(NamedTuple):
    """A container, uint8[m], and what the sender knows about it; see grace_ext.pipeline.encoded.Encoded.

    support: the positions that have been sent, int32[k] on the device; None for all.
    """

    blob: np.ndarray
    seconds: dict[str, float]
    index_codec: str | None
    non_finite: bool
    support: torch.Tensor | None = None


def fits(compressor: Compressor) -> bool:
    """Whether gradients can be encoded where they are: by magnitude, or all elements with a codec that has kernels."""
    transform, sparsifier = compressor.transform, compressor.sparsifier
    if compressor.lowrank is not None or transform is not None and not device_transform.fits((transform.id, b"")):
        return False
    if compressor.dense:
        return transform is None and device_values.find(compressor.value) is not None
    return not compressor.unbiased and device_selection.fits(sparsifier, transform)


def reads_once(compressor: Compressor) -> bool:
    """Whether `encode` needs the sum only once, and for what has been selected, so that it takes parts, and bfloat16 for what remains."""
    return (
        fits(compressor)
        and not compressor.dense
        and compressor.transform is None
        and compressor.index.lossless
        and device_selection.selects_while_rounding(compressor.sparsifier)
    )


def encode(
    compressor: Compressor,
    gradient: torch.Tensor | Parts,
    residual: torch.Tensor | None,
    stream: Stream,
    started: float,
    sizes: tuple[int, ...] | None = None,
    *,
    in_place: bool = False,
    following: torch.Tensor | None = None,
) -> DeviceEncoded:
    """Encode gradient + residual, or the gradient where the residual is None.

    sizes: numbers of elements of the tensors that the gradient consists of; None for a single tensor.

    gradient: float32[d], and with a residual or `in_place` overwritten by what the container does not carry (undefined if gradient +
    residual is not finite). following: only if the compressor `reads_once`, with a residual: float32[d], or, if the residual is
    bfloat16[d], the bits of such a state, int16[d], which gets what remains instead; the gradient can be Parts then. The work is
    queued on the current stream; at the end the host has waited for it.
    """
    container.check_elements(gradient.numel())
    clock = StageClock(started)
    keep = in_place or residual is not None
    if compressor.dense:
        return _encode_dense(compressor, gradient, residual, keep, stream, clock)
    if compressor.transform is not None:
        return _encode_transformed(compressor, gradient, residual, keep, stream, clock)
    remainder = (gradient if following is None else following) if keep else None
    return _encode_sparse(compressor, gradient, residual, remainder, stream, clock, sizes or (gradient.numel(),))


def _non_finite(d: int, clock: StageClock) -> DeviceEncoded:
    return DeviceEncoded(container.pack_non_finite(d), clock.seconds, None, True)


def _encode_dense(compressor, gradient, residual, keep, stream, clock) -> DeviceEncoded:
    d, codec = gradient.numel(), device_values.find(compressor.value)
    if _is_longer_than_raw(codec.sizes(d), d):
        return _encode_few(compressor, gradient, residual, keep, stream, clock)
    source = codec.prepare(Source(gradient, residual, None, gradient if keep else None))
    if source is None:
        return _non_finite(compressor.elements_of(d), clock)
    outbox = Outbox({"special": 4, **codec.sizes(d)}, gradient.device)
    codec.encode(source, outbox, outbox.view("special", torch.int32), stream.key())
    fetched = outbox.fetch()
    clock.lap("value")
    if fetched["special"].any():
        return _non_finite(compressor.elements_of(d), clock)
    index_id, index_section, _ = compressor.encode_index(None, d, stream)
    value_id, section = _value_section(compressor, codec, source, fetched)
    blob = container.pack(compressor.elements_of(d), d, index_id, index_section, value_id, section)
    clock.lap("container")
    return DeviceEncoded(blob, clock.seconds, registry.by_id("index", index_id).name if index_id else None, False)


def _value_section(compressor, codec, source: Source, fetched) -> tuple[int, np.ndarray]:
    """The id and the section of values that kernels have encoded, raw where that is not longer; and their remainder."""
    n, section = source.values.numel(), codec.section(fetched)
    if section.size < 4 * n:
        codec.subtract(source)
        return compressor.value.id, section
    raw = to_host(source.values).copy().view(np.uint8)
    if source.remainder is not None:
        source.remainder[... if source.positions is None else source.positions.long()] = 0
    return RawValue.id, raw


def _encode_few(compressor, gradient, residual, keep, stream, clock) -> DeviceEncoded:
    """A dense gradient of so few elements that the host might send them raw: it does all of it."""
    if residual is not None:
        gradient += residual
    values = to_host(gradient).copy()
    encoded = compressor.pack(values.size, None, values, lambda support: values[support], stream)
    if keep and not encoded.non_finite:
        gradient.copy_(to_device(encoded.values - encoded.decoded, gradient.device))
    return DeviceEncoded(encoded.blob, clock.seconds | encoded.seconds, encoded.index_codec, encoded.non_finite)


def _is_longer_than_raw(sizes: dict[str, int], n: int) -> bool:
    """Whether a value section might be longer than float32[n] is, so that the host decides between the two."""
    return sum(sizes.values()) + 8 >= 4 * n  # the parameters have fewer than 8 bytes


def _encode_transformed(compressor, gradient, residual, keep, stream, clock) -> DeviceEncoded:
    """Encode the transform's coefficients. What remains of the gradient is what a receiver of the container does not get."""
    if residual is not None:
        gradient += residual
    coefficients = device_transform.forward(gradient, compressor.transform)
    clock.lap("transform")
    encoded = _encode_sparse(compressor, coefficients, None, None, stream, clock, (coefficients.numel(),), gradient.numel())
    if keep and not encoded.non_finite:
        sent = torch.empty_like(gradient)
        device_decoder.decode_sum([container.parse(encoded.blob)], sent, 1.0)
        gradient -= sent
        clock.lap("residual")
    return encoded._replace(support=None)


def _encode_sparse(
    compressor, gradient, residual, remainder, stream, clock, sizes, given: int | None = None
) -> DeviceEncoded:
    """remainder: what remains goes there, None for nowhere. given: elements of the gradient whose transform this is, None for this one."""
    d, device = gradient.numel(), gradient.device
    transform = None if given is None else compressor.transform
    chunk = transform.chunk if transform is not None and compressor.sparsifier.needs_chunks else 0
    selection = device_selection.select(compressor.sparsifier, gradient, residual, sizes, stream, chunk, remainder)
    clock.lap("select")
    if not selection.finite:
        return _non_finite(compressor.elements_of(d) if given is None else given, clock)
    n = selection.positions.numel()
    source = Source(selection.bits.view(torch.float32), None, selection.positions, remainder)
    if n and not compressor.index.lossless:
        return _encode_elsewhere(compressor, gradient, source, stream, clock, given)
    codec = _value_codec(compressor, n)
    if codec:
        source = codec.prepare(source)
    e, fetched = _fetch(d, source, codec, stream, device)
    clock.lap("value")
    index_id, index_section = _index_section(compressor, d, n, e, fetched, stream)
    clock.lap("index")
    return _pack(compressor, d, given, index_id, index_section, source, source.values, codec, fetched, stream, clock)


def _value_codec(compressor, n: int):
    """The kernels for n values, or None where the host encodes them."""
    codec = device_values.find(compressor.fitted_value) if n else None
    return None if codec is None or _is_longer_than_raw(codec.sizes(n), n) else codec


def _fetch(d: int, source: Source, codec, stream, device, values: bool = True) -> tuple[int, dict[str, np.ndarray]]:
    """Bring positions as Rice codes, whose shift is returned, and values: encoded, or as float32 where there is no codec."""
    n = source.positions.numel()
    e = best_shift(d, n) if n else MAX_SHIFT  # which leaves no room for quotients that there are not
    sizes = {"remainders": remainder_bytes(n, e), "unary": quotient_room(d, n, e), "bits": 4}
    outbox = Outbox(sizes | (_value_sizes(codec, n) if values else {}), device)
    if n:
        bits = rice.encode(source.positions, e, outbox.words("remainders"), outbox.words("unary"))
        outbox.view("bits", torch.int32).copy_(bits)
    if values:
        _put_values(source, codec, outbox, stream)
    fetched = outbox.fetch()
    fetched["unary"] = fetched["unary"][: (int(fetched["bits"].view(np.int32)[0]) + 7) // 8]
    return e, fetched


def _value_sizes(codec, n: int) -> dict[str, int]:
    return codec.sizes(n) if codec else {"values": 4 * n}


def _put_values(source: Source, codec, outbox: Outbox, stream) -> None:
    if codec:
        codec.encode(source, outbox, None, stream.key())
    else:
        outbox.view("values", torch.float32).copy_(source.values)


def _index_section(compressor, d, n, e, fetched, stream) -> tuple[int, np.ndarray]:
    """The id and the section of the positions, which have crossed as Rice codes."""
    if n and compressor.index.name == Rice.name:
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


def _encode_elsewhere(compressor, gradient, source: Source, stream, clock, given) -> DeviceEncoded:
    """With an index codec that rebuilds another support than the selected positions: these cross first, then the values there."""
    d, device = gradient.numel(), gradient.device
    e, fetched = _fetch(d, source, None, stream, device, values=False)
    indices = _positions(d, source.positions.numel(), e, fetched)
    index_id, section, support = compressor.encode_index(indices, d, stream)
    sent, values = source, source.values  # what is encoded, and what it stands for
    if support is not indices:
        positions = to_device(support.view(np.int32), device)
        values = gradient[positions.long()]
        shifted = compressor.index.remaps_values and index_id == compressor.index.id
        sent = dataclasses.replace(source, positions=positions, values=source.values if shifted else values)
    clock.lap("index")
    # What shifted values leave is another difference than kernels write.
    codec = None if values is not sent.values else _value_codec(compressor, values.numel())
    if codec:
        sent = codec.prepare(sent)
    outbox = Outbox({"largest": 4} | _value_sizes(codec, values.numel()), device)
    if values is not sent.values:
        bits = torch.cat([values, sent.values]).view(torch.int32)
        outbox.view("largest", torch.int32).copy_((bits & MAGNITUDE).amax())
    _put_values(sent, codec, outbox, stream)
    fetched = outbox.fetch()
    clock.lap("value")
    if fetched["largest"].view(np.uint32)[0] >= HUGE:
        index_id, (section, _), sent, values = RawIndex.id, RawIndex().encode(indices, d), source, source.values
    return _pack(compressor, d, given, index_id, section, sent, values, codec, fetched, stream, clock)


def _pack(
    compressor, d, given, index_id, index_section, source: Source, values, codec, fetched, stream, clock
) -> DeviceEncoded:
    """Write the container and the remainder. values: float32[n] on the device, those that the source's stand for."""
    n, order = values.numel(), None
    if codec:
        value_id, section = _value_section(compressor, codec, source, fetched)
    else:
        sent = fetched["values"].view(np.float32)
        value, section, order = compressor.encode_values(sent, stream, with_order=index_id != Keys.id)
        value_id = value.id
    clock.lap("value codec")
    index_section, sent_order = Keys.following(index_id, index_section, order)
    transform = None if given is None else (compressor.transform.id, compressor.transform.parameters())
    elements = compressor.elements_of(d) if given is None else given
    blob = container.pack(elements, n, index_id, index_section, value_id, section, order=sent_order, transform=transform)
    clock.lap("container")
    if not codec and source.remainder is not None:
        received = source.values
        if not value.lossless:
            received = to_device(as_received(sent, value, section, order), values.device)
        source.keep(values - received)
        clock.lap("residual")
    clock.seconds["value"] += clock.seconds.pop("value codec")
    return DeviceEncoded(blob, clock.seconds, registry.by_id("index", index_id).name, False, source.positions)
