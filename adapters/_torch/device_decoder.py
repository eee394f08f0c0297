"""Summing received containers where the gradient is. What kernels can't decode, the host decodes, and uploads."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from grace_ext import ContainerError
from grace_ext.index.rice import Rice
from grace_ext.pipeline import decoder
from grace_ext.pipeline.container import Container

from . import device_transform, device_values
from .kernels import accumulate, rice
from .mailbox import Inbox, to_device, to_host


def decode_sum(containers: list[Container], out: torch.Tensor, weight: float) -> bool:
    """out = weight * (sum of the containers' gradients), each element summed in the order of the list.

    out: float32[d]; NaN everywhere if a container is not finite, for which it returns False. Raises ContainerError if one is
    damaged; `out` is undefined then. The host waits once, for whether a code was out of range.
    """
    if any(one.non_finite for one in containers):
        out.fill_(torch.nan)
        return False
    if any(one.transform for one in containers):
        _decode_transformed(containers, out, weight)
        return True
    out.zero_()
    add_each([(one, out) for one in containers], weight)
    return True


def _decode_transformed(containers: list[Container], out: torch.Tensor, weight: float) -> None:
    """Coefficients are summed before the transform is inverted; where containers have different ones, the host does all."""
    transforms = {one.transform for one in containers}
    if (
        len(transforms) > 1
        or not all(one.index_id for one in containers)
        or not device_transform.fits(containers[0].transform)
    ):
        summed = np.empty(out.numel(), np.float32)
        decoder.decode_sum(containers, summed, weight)
        out.copy_(to_device(summed, out.device))
        return
    coefficients = torch.zeros(containers[0].domain, dtype=torch.float32, device=out.device)
    add_each([(one, coefficients) for one in containers], 1.0)
    restored = device_transform.inverse(coefficients, containers[0].transform[1])
    torch.mul(restored[: out.numel()], weight, out=out)


def add_each(targets: Sequence[tuple[Container, torch.Tensor]], weight: float) -> None:
    """Add weight * what each container holds, all of it finite, to the float32[domain] beside it: coefficients of a transform.

    Raises ContainerError if one is damaged; the arrays are undefined then. The host waits once, for whether a code was out of range.
    """
    if not targets:
        return
    sections: dict[str, np.ndarray] = {}
    parts = [_prepare(one, f"{number}", sections) for number, (one, _) in enumerate(targets)]
    device = targets[0][1].device
    inbox = Inbox(sections, device)
    bad = torch.zeros((len(parts), 2), dtype=torch.int32, device=device)
    messages = []
    for decode, flags, (_, out) in zip(parts, bad, targets, strict=True):
        positions, values, wrong = decode(inbox, out, flags)
        messages.append(wrong)
        accumulate.add(out, positions, values, weight)
    for flags, wrong in zip(to_host(bad), messages, strict=False):
        for flag, message in zip(flags, wrong, strict=True):
            if flag:
                raise ContainerError(message)


def _prepare(one: Container, prefix: str, sections: dict[str, np.ndarray]) -> Callable:
    """Put what is to be uploaded of a container into the sections.

    Returns decode(inbox, out, bad) -> (positions, values, messages), where bad, int32[2], tells which messages are true.
    """
    codec = device_values.find_decoder(one.value_id)
    is_known = one.k > 0 and one.index_id in (0, Rice.id) and one.order_section is None and codec is not None
    unpacked = codec.unpack(one.value_section, one.k) if is_known else None
    if unpacked is None:
        return _from_host(one, prefix, sections)
    values, options = unpacked
    sections.update({f"{prefix} {name}": section for name, section in values.items()})
    e = -1
    if one.index_id:
        e, sections[f"{prefix} remainders"], sections[f"{prefix} unary"] = Rice.parts(one.index_section, one.domain, one.k)
        if not sections[f"{prefix} unary"][-1]:
            raise ContainerError(_not_positions(one))

    def decode(inbox: Inbox, out: torch.Tensor, bad: torch.Tensor):
        found = torch.empty(one.k, dtype=torch.float32, device=out.device)
        positions = None if e < 0 else _read_positions(one, inbox, prefix, e, bad)
        wrong = codec.decode(inbox, prefix, found, bad[1:], **options)
        return positions, found, (_not_positions(one), wrong)

    return decode


def _read_positions(one: Container, inbox: Inbox, prefix: str, e: int, bad: torch.Tensor) -> torch.Tensor:
    positions = torch.empty(one.k, dtype=torch.int32, device=bad.device)
    ones = rice.decode(inbox.words(f"{prefix} remainders"), inbox.words(f"{prefix} unary"), e, one.k, positions)
    last = positions[-1:]
    bad[:1].copy_((ones != one.k) | (last < 0) | (last >= one.domain))
    return positions


def _not_positions(one: Container) -> str:
    return f"rice: the codes are not {one.k} positions below {one.domain}"


def _from_host(one: Container, prefix: str, sections: dict[str, np.ndarray]) -> Callable:
    support, values = np.empty(one.k if one.index_id else 0, np.uint32), np.empty(one.k, np.float32)
    is_sparse = decoder.unpack(one, support, values)
    sections[f"{prefix} positions"], sections[f"{prefix} values"] = support.view(np.uint8), values.view(np.uint8)

    def decode(inbox: Inbox, out: torch.Tensor, bad: torch.Tensor):
        positions = inbox.view(f"{prefix} positions", torch.int32) if is_sparse else None
        return positions, inbox.view(f"{prefix} values", torch.float32), ("", "")

    return decode
