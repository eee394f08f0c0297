"""Measurements of index codecs and value codecs on one gradient. Each function returns rows: dicts of figures."""

import math

import numpy as np

from ..errors import GraceError
from ..pipeline import container
from . import peers
from .subject import Candidate, Subject, relative_error, warm_cache, with_times
from .variants import curve, label, variants

_DENSE_VALUES = 1 << 21  # the most values of a dense gradient that value codecs are measured on


def index_bound(d: int, k: int) -> float:
    """Compute log2 C(d, k) / k, the bits per index that uniformly random positions need on average at least.

    Args:
        d: Number of elements.
        k: Number of selected elements.

    Returns:
        Bits per index.
    """
    return (math.lgamma(d + 1) - math.lgamma(k + 1) - math.lgamma(d - k + 1)) / math.log(2) / k


def index_codecs(subject: Subject, density: float, sweep: bool) -> list[dict]:
    """Measure the index codecs on the positions of the top-k, with other libraries' for comparison.

    Args:
        subject: The gradient.
        density: Share of the elements that are selected.
        sweep: Whether to measure the settings of the codecs' sweeps as well as the defaults.

    Returns:
        One row per codec.

    Raises:
        GraceError: A codec does not decode to its support.
    """
    indices, _ = subject.support(density)
    d, candidates, rows = subject.d, {}, []

    def add(stage, name, peer, payload, support, encode, decode, **more):
        candidates[stage, "encode"] = Candidate(encode, warm_cache(indices))
        candidates[stage, "decode"] = Candidate(decode, warm_cache(payload))
        rows.append(
            {
                "density": density,
                "name": name,
                "stage": stage,
                "peer": peer,
                "k": indices.size,
                "bits": 8 * payload.size / indices.size,
                "bound": index_bound(d, indices.size),
                **_hits(indices, support, d),
                "chosen": name,
                "view": False,
                **more,
            }
        )

    for codec in variants("index", sweep):
        if not codec.universal:
            continue  # for the positions of one sparsifier only
        chosen = codec.choose(indices, d)
        payload, support = codec.encode(indices, d)
        view = np.may_share_memory(payload, indices)
        payload, out = payload.copy(), np.empty(support.size, np.uint32)
        chosen.decode(payload, d, out)
        if not np.array_equal(out, support) or (codec.lossless and not np.array_equal(out, indices)):
            raise GraceError(f"index codec {str(codec)!r} does not give its support back")
        add(
            str(codec),
            codec.name,
            False,
            payload,
            support,
            lambda codec=codec: codec.encode(indices, d),
            lambda codec=chosen, payload=payload, out=out: codec.decode(payload, d, out),
            chosen=chosen.name,
            view=view,
        )
    for name, peer in peers.index(indices, d, sweep).items() if subject.peers else ():
        payload = peer.encode()
        add(
            name,
            name,
            True,
            payload,
            peer.positions(payload),
            peer.encode,
            lambda peer=peer, payload=payload: peer.decode(payload),
            decode_scale=peer.decode_scale,
        )
        rows[-1]["fpr"] = peer.fpr
    return with_times(rows, subject.compare(candidates))


def _hits(indices, support, d) -> dict:
    """Compare the positions that are rebuilt with the selected ones.

    support: how many positions are rebuilt; kept: the share of the selected ones among them; fpr: the share of the others
    that are rebuilt as well, where nothing limits their number. `support` may be None: not known.
    """
    if support is None or support is indices or np.array_equal(support, indices):
        return {"support": indices.size, "kept": None, "fpr": None}
    kept = np.intersect1d(support, indices, assume_unique=True).size
    grown = support.size > indices.size and d > indices.size
    return {
        "support": support.size,
        "kept": kept / indices.size,
        "fpr": (support.size - kept) / (d - indices.size) if grown else None,
    }


def value_codecs(subject: Subject, density: float) -> list[dict]:
    """Measure the value codecs at their defaults and at the settings of their sweeps, with other libraries' for comparison.

    Args:
        subject: The gradient.
        density: Share of the largest values that they are measured on; they are also measured on the dense gradient.

    Returns:
        One row per codec and kind of values.
    """
    rows = []
    for where, values in ((f"top {density:.4g}", subject.support(density)[1]), ("dense", subject.gradient[:_DENSE_VALUES])):
        candidates, found = {}, []

        def add(
            stage,
            payload,
            decoded,
            encode,
            decode,
            values=values,
            candidates=candidates,
            found=found,
            where=where,
            order_bits=0,
            **more,
        ):
            candidates[stage, "encode"] = Candidate(encode, warm_cache(values))
            candidates[stage, "decode"] = Candidate(decode, warm_cache(payload))
            found.append(
                {
                    "values": where,
                    "stage": stage,
                    "k": values.size,
                    "view": False,
                    "peer": False,
                    "bits": 8 * payload.size / values.size + order_bits,
                    "error": relative_error(values, decoded),
                    **more,
                }
            )

        for codec in variants("value"):
            payload, order = codec.encode(values, subject.stream)
            out = np.empty(values.size, np.float32)
            codec.decode(payload, out)
            add(
                label(codec),
                payload,
                _restored(out, order),
                lambda codec=codec, values=values: codec.encode(values, subject.stream),
                lambda codec=codec, payload=payload, out=out: codec.decode(payload, out),
                order_bits=0 if order is None else container.order_width(values.size),
                name=codec.name,
                curve=curve(codec),
                lossless=codec.lossless,
                view=np.may_share_memory(payload, values),
            )
        for name, peer in peers.value(values).items() if subject.peers else ():
            payload = peer.encode()
            decoded = peer.decode(payload)
            add(
                name,
                payload,
                decoded,
                peer.encode,
                lambda peer=peer, payload=payload: peer.decode(payload),
                peer=True,
                name=name,
                curve=peer.curve,
                lossless=peer.lossless,
            )
        rows += with_times(found, subject.compare(candidates))
    return rows


def _restored(decoded: np.ndarray, order: np.ndarray | None) -> np.ndarray:
    if order is None:
        return decoded
    restored = np.empty_like(decoded)
    restored[order] = decoded
    return restored
