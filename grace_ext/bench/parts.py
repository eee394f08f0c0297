"""Measurements of single parts on one gradient. Each returns rows: dicts of numbers."""

import contextlib
import itertools
import math

import numpy as np

from .. import registry
from ..errors import GraceError
from ..pipeline import container
from . import peers
from .subject import Contestant, Subject, relative_error, touch, with_times

_DENSE_VALUES = 1 << 21  # at most so many when value codecs are measured on a dense gradient


def index_bound(d: int, k: int) -> float:
    """log2 C(d, k) / k: bits per index that uniformly random positions cannot go below on average."""
    return (math.lgamma(d + 1) - math.lgamma(k + 1) - math.lgamma(d - k + 1)) / math.log(2) / k


def variants(kind: str, sweep: bool = True) -> list[registry.Stage]:
    """Every part of a kind with its defaults and, if wanted, at the settings of its `sweep`: option -> values, all
    combinations of them."""
    found = []
    for name in registry.names(kind):
        default, options = registry.build(kind, name), registry.lookup(kind, name).sweep if sweep else {}
        swept = [
            registry.build(kind, name, dict(zip(options, values, strict=True)))
            for values in itertools.product(*options.values())
        ]
        found += swept if default in swept else [default, *swept]
    return found


def label(stage: registry.Stage) -> str:
    """As in a spec, but always with the first option."""
    text = stage.name
    for place, (key, parameter) in enumerate(registry.parameters(type(stage)).items()):
        value = getattr(stage, key)
        if place == 0:
            text += f":{value}"
        elif value != parameter.default:
            text += f":{key}={value}"
    return text


def curve(stage: registry.Stage) -> str:
    """What the settings of a sweep have in common that differ in its first option only."""
    others = list(type(stage).sweep)[1:]
    return stage.name + "".join(
        f":{key}={value}"
        for key, value in stage.options().items()
        if key in others and value != registry.parameters(type(stage))[key].default
    )


def selection(subject: Subject, density: float) -> list[dict]:
    """All sparsifiers, plain and fused with the error-feedback add; torch and numpy beside them."""
    gradient, scope = subject.gradient, subject.scope
    residual, out = np.roll(gradient, subject.d // 3), np.empty_like(gradient)
    smallest = float(abs(subject.support(density)[1]).min())
    contestants, selected = {}, {}
    for name in registry.names("sparsifier"):
        options = registry.parameters(registry.lookup("sparsifier", name))
        wanted = {"density": density, "value": smallest}  # a threshold that lets as many pass
        stage = registry.build("sparsifier", name, {key: wanted[key] for key in wanted if key in options})
        indices = stage.select(gradient, scope)[0]
        if indices is None:
            continue  # dense: nothing is selected
        selected[name] = indices.size
        contestants[name, "plain"] = Contestant(lambda stage=stage: stage.select(gradient, scope))
        contestants[name, "fused"] = Contestant(lambda stage=stage: stage.select_compensated(gradient, residual, out, scope))
    contestants["np.add", "error feedback only"] = Contestant(lambda: np.add(gradient, residual, out=out))
    k = max(1, round(density * subject.d))
    with peers.selection(gradient, k) if subject.peers else contextlib.nullcontext({}) as others:
        times = subject.race({**contestants, **others})
    return [
        {"density": density, "name": name, "form": form, "selected": selected.get(name), **one}
        for (name, form), one in times.items()
    ]


def index_codecs(subject: Subject, density: float, sweep: bool) -> list[dict]:
    """At their defaults and, if wanted, at the settings of their sweeps; with libraries beside them."""
    indices, _ = subject.support(density)
    d, contestants, rows = subject.d, {}, []

    def add(stage, name, peer, payload, support, encode, decode, **more):
        contestants[stage, "encode"] = Contestant(encode, touch(indices))
        contestants[stage, "decode"] = Contestant(decode, touch(payload))
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
            peer.check(payload),
            peer.encode,
            lambda peer=peer, payload=payload: peer.decode(payload),
            decode_scale=peer.decode_scale,
        )
        rows[-1]["fpr"] = peer.fpr
    return with_times(rows, subject.race(contestants))


def _hits(indices, support, d) -> dict:
    """support: how many positions are rebuilt; kept: the share of the selected among them; fpr: the share of the others
    that are rebuilt as well, where nothing limits their number. support may be None: not known."""
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
    """At their defaults and at the settings of their sweeps, on the largest values and on the whole gradient."""
    rows = []
    for where, values in ((f"top {density:.4g}", subject.support(density)[1]), ("dense", subject.gradient[:_DENSE_VALUES])):
        contestants, found = {}, []

        def add(
            stage,
            payload,
            decoded,
            encode,
            decode,
            values=values,
            contestants=contestants,
            found=found,
            where=where,
            order_bits=0,
            **more,
        ):
            contestants[stage, "encode"] = Contestant(encode, touch(values))
            contestants[stage, "decode"] = Contestant(decode, touch(payload))
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
        rows += with_times(found, subject.race(contestants))
    return rows


def _restored(decoded: np.ndarray, order: np.ndarray | None) -> np.ndarray:
    if order is None:
        return decoded
    restored = np.empty_like(decoded)
    restored[order] = decoded
    return restored


def transforms(subject: Subject, density: float) -> list[dict]:
    """What the largest coefficients leave out, of all and of each chunk; beside it, what the top-k of the gradient does."""
    gradient = subject.gradient
    plain = _left_out(gradient, subject.support(density)[1])
    rows, contestants = [], {}
    for transform in variants("transform"):
        parameters = transform.parameters()
        coefficients = np.empty(transform.domain(parameters, subject.d), np.float32)
        work = np.empty_like(coefficients)
        transform.forward(gradient, coefficients)
        k = max(1, round(density * coefficients.size))
        magnitudes = np.abs(coefficients)
        chunks = magnitudes.reshape(-1, transform.chunk)
        in_chunk = max(1, round(density * transform.chunk))
        rows.append(
            {
                "stage": label(transform),
                "density": density,
                "plain": plain,
                "whole": _left_out(gradient, np.partition(magnitudes, magnitudes.size - k)[-k:]),
                "chunks": _left_out(gradient, np.partition(chunks, transform.chunk - in_chunk, axis=1)[:, -in_chunk:]),
            }
        )
        contestants[label(transform), "encode"] = Contestant(
            lambda transform=transform, work=work: transform.forward(gradient, work)
        )
        contestants[label(transform), "decode"] = Contestant(
            lambda transform=transform, parameters=parameters, work=work: transform.inverse(parameters, work),
            lambda work=work, coefficients=coefficients: np.copyto(work, coefficients),
        )
    return with_times(rows, subject.race(contestants), None) if rows else []


def _left_out(gradient: np.ndarray, kept: np.ndarray) -> float:
    """Relative 2-norm error of keeping these coefficients of an orthonormal transform."""
    return math.sqrt(
        max(0.0, 1 - np.linalg.norm(kept.astype(np.float64)) ** 2 / np.linalg.norm(gradient.astype(np.float64)) ** 2)
    )


def low_rank(subject: Subject) -> list[dict]:
    """One step of PowerSGD's mathematics, ours and torch's, without any exchange, on the gradient as one matrix."""
    rows = 1 << max(0, int(math.log2(subject.d)) // 2)
    matrix = subject.gradient[: subject.d // rows * rows].reshape(rows, -1)
    found, contestants = [], {}
    for rank in (1, 4) if min(matrix.shape) > 4 else ():
        steps = {f"powersgd:{rank}": peers.our_powersgd(rank)}
        if subject.peers:
            steps.update(peers.torch_powersgd(rank))
        for name, step in steps.items():
            state = step(matrix, None)  # a warm start, as from the step before
            found.append(
                {
                    "stage": name,
                    "rank": rank,
                    "shape": list(matrix.shape),
                    "volume": rank * sum(matrix.shape) / matrix.size,
                    "error": relative_error(matrix.reshape(-1), step(matrix, state)[0].reshape(-1)),
                }
            )
            contestants[name] = Contestant(lambda step=step, state=state: step(matrix, state))
    times = subject.race(contestants) if contestants else {}
    return [{**row, **times[row["stage"]]} for row in found]
