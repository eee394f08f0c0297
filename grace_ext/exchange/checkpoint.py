"""What a checkpoint keeps of an exchange, and what becomes of it when it is loaded, by as many ranks or by others.

A saved state is a dict that adapters put beside the optimizer's own under KEY; its arrays are numpy's here, and tensors of
the framework in the file:

    {"version": 1, "ranks": n, "step": the number of the next one, "order": names of the tensors in the order of the buckets
     (empty before the first step), "bucket_bytes": the size of buckets, only if the ranks have chosen it,
     "memories": {rank: {field: {tensor name: float32[size]}}}}

The fields are those of Exchange.state_dict. A rank saves its own memory, or those of all ranks if they were gathered.
"""

import dataclasses
import logging

import numpy as np

from ..errors import ConfigError
from ..transport.base import Transport
from .buckets import Bucket, Tensor
from .engine import Exchange
from .state import DENSITY, WARM_STARTS

_LOG = logging.getLogger("grace_ext")
KEY = "grace_ext"
VERSION = 1
RESET, REDISTRIBUTE = "reset", "redistribute"
#: What on_resize may be. None: redistribute what there is, and reset where it is not all there.
POLICIES = (None, RESET, REDISTRIBUTE)
ALL_RANKS = "call consolidate_state_dict() on all ranks before rank 0 saves, or save a file on every rank"


@dataclasses.dataclass
class Loaded:
    """What a rank starts with after a checkpoint was read.

    Attributes:
        state: The state for Exchange.load_state_dict.
        is_restored: Whether this rank's memory is what was saved.
        message: A sentence for the log that says what was found and done.
        is_incomplete: Whether something of the saved state was left out.
    """

    state: dict
    is_restored: bool
    message: str
    is_incomplete: bool = True

    @property
    def whole(self) -> bool:
        """The former name of `is_restored`."""
        return self.is_restored

    @property
    def what(self) -> str:
        """The former name of `message`."""
        return self.message

    @property
    def lost(self) -> bool:
        """The former name of `is_incomplete`."""
        return self.is_incomplete


def check_policy(on_resize: object) -> None:
    """Check an `on_resize` option.

    Args:
        on_resize: What a user gave.

    Raises:
        ConfigError: It is not one of POLICIES.
    """
    if on_resize not in POLICIES:
        raise ConfigError(f"on_resize={on_resize!r}; allowed: {', '.join(map(repr, POLICIES))}")


def pack(state: dict, rank: int, ranks: int, order: list[str], bucket_bytes: int | None = None) -> dict:
    """Make the saved state of one rank.

    Args:
        state: What Exchange.state_dict gave.
        rank: The rank.
        ranks: How many there are.
        order: The names of the tensors in the order of the buckets; empty if it is not known yet.
        bucket_bytes: The size of buckets that the ranks have chosen; None if they have not.

    Returns:
        The saved state.
    """
    memory = {field: value for field, value in state.items() if field != "step"}
    chosen = {} if bucket_bytes is None else {"bucket_bytes": bucket_bytes}
    layout = {"order": list(order), **chosen}
    return {"version": VERSION, "ranks": ranks, "step": state["step"], **layout, "memories": {rank: memory}}


def choose(saved: dict | None, exchange: Exchange, on_resize: str | None) -> Loaded:
    """Choose what this rank of the exchange starts with.

    Args:
        saved: The saved state; None if there is none, as in a plain optimizer's checkpoint.
        exchange: The exchange that will load it.
        on_resize: One of POLICIES.

    Returns:
        What to load, and what to say about it.

    Raises:
        ConfigError: The version is not known, or on_resize is "redistribute" and memories of some ranks are missing.
    """
    rank, ranks = exchange.transport.rank, exchange.transport.size
    if saved is None:
        return Loaded({"step": 0}, False, "the checkpoint has no state of grace_ext: memories start from zero")
    check_version(saved)
    memories, step = saved["memories"], {"step": saved["step"]}
    if saved["ranks"] == ranks:
        if rank in memories:
            return _loaded(step | memories[rank], f"the memory of {ranks} ranks was restored", memories[rank], exchange)
        return Loaded(
            step,
            False,
            f"the checkpoint has no memory of rank {rank} (only of ranks {sorted(memories)}); it starts from zero: {ALL_RANKS}",
        )
    sizes = f"the checkpoint is of {saved['ranks']} ranks, and there are {ranks} now"
    complete = len(memories) == saved["ranks"]
    if on_resize == REDISTRIBUTE and not complete:
        raise ConfigError(
            f"on_resize='redistribute' needs the memories of all {saved['ranks']} ranks, and the checkpoint "
            f"has those of ranks {sorted(memories)}: {ALL_RANKS}"
        )
    if on_resize == RESET or not complete:
        why = "" if on_resize == RESET else f" (those of ranks {sorted(memories)} are there: {ALL_RANKS})"
        return Loaded(step, False, f"{sizes}: memories start from zero{why}")
    state = redistribute(exchange, list(memories.values()), ranks)
    return _loaded(step | state, f"{sizes}: memories were redistributed", memories[min(memories)], exchange)


def _loaded(state: dict, message: str, saved: dict, exchange: Exchange) -> Loaded:
    """saved: one of the memories that went into the state, some of which may have no place in this exchange."""
    kept = {
        tensor.name: {*bucket.memory.states, *bucket.memory.shared}
        for bucket in exchange.buckets
        for tensor in bucket.tensors
    }
    unknown = sorted(saved.keys() - {WARM_STARTS, DENSITY}.union(*kept.values()))
    names = sorted({name for by_name in saved.values() for name in by_name} - kept.keys())
    for kind, strangers in (("no memory here has", unknown), ("no tensor here is named", names)):
        if strangers:
            message += f"; left out, since {kind} {', '.join(strangers[:5])}{', …' if len(strangers) > 5 else ''}"
    return Loaded(state, True, message, bool(unknown or names))


def settle(exchange: Exchange, whole: np.ndarray, steps: np.ndarray) -> str:
    """Have all ranks start from one state after all or some of them have loaded what `choose` gave, and report a warning.

    Args:
        exchange: This rank's exchange.
        whole: bool[ranks], whether each rank has its memory from a checkpoint.
        steps: int64[ranks], the steps of the ranks' exchanges.

    Returns:
        The warning that was reported, or "".

    Raises:
        ConfigError: The checkpoints were of different steps; on all ranks.
    """
    if len(set(steps[whole].tolist())) > 1:
        raise ConfigError(f"the ranks loaded checkpoints of different steps: {steps.tolist()}")
    warning = ""
    if 0 < np.count_nonzero(whole) < whole.size:
        state = exchange.state_dict() if states_are_additive(exchange) else {}
        for field in exchange.state.shared_fields:
            state.pop(field, None)
        exchange.load_state_dict(state)
        others = (
            "the others start from zero"
            if state
            else "all start from zero, because this memory needs the states of all ranks"
        )
        warning = f"{np.count_nonzero(whole)} of {whole.size} ranks loaded their memory, and {others}: {ALL_RANKS}"
        report(exchange, warning)
    exchange.step = int(steps[whole][0] if whole.any() else steps[0])
    exchange.states_settled()
    return warning


def load(saved: dict | None, exchange: Exchange, on_resize: str | None) -> bool:
    """Load what `choose` finds, and report it.

    Args:
        saved: See `choose`.
        exchange: The exchange that takes it over.
        on_resize: See `choose`.

    Returns:
        Whether this rank's memory is what was saved.

    Raises:
        ConfigError: As `choose`, and for a state of another size.
    """
    loaded = choose(saved, exchange, on_resize)
    exchange.load_state_dict(loaded.state)
    report(exchange, loaded.message, logging.WARNING if loaded.is_incomplete else logging.INFO)
    return loaded.is_restored


def report(exchange: Exchange, text: str, level: int = logging.WARNING) -> None:
    """Write a line to the log "grace_ext", on rank 0 only.

    Args:
        exchange: The exchange that the line is about.
        text: The line.
        level: Its level.
    """
    if exchange.transport.rank == 0:
        _LOG.log(level, "%s", text)


def check_version(saved: dict) -> None:
    """Check the version of a saved state.

    Args:
        saved: The saved state.

    Raises:
        ConfigError: The version is not known.
    """
    if saved.get("version") != VERSION:
        raise ConfigError(f"the checkpoint's state of grace_ext is of version {saved.get('version')}; known: {VERSION}")


def redistribute(exchange: Exchange, memories: list[dict], ranks: int) -> dict:
    """Compute what each rank takes over from other ranks' memories: for errors, an equal part of their sum.

    Args:
        exchange: The exchange that will load it.
        memories: Those of the other ranks, as in a saved state.
        ranks: How many ranks take over a part.

    Returns:
        The state for Exchange.load_state_dict, without the step.
    """
    shared = exchange.state.shared_fields
    state = {field: memory[field] for memory in reversed(memories) for field in shared if field in memory}
    for bucket in exchange.buckets:
        for tensor in bucket.tensors:
            theirs = [
                {field: memory[field][tensor.name] for field in bucket.memory.states if tensor.name in memory.get(field, ())}
                for memory in memories
            ]
            for field, array in bucket.memory.redistribute(theirs, ranks).items():
                state.setdefault(field, {})[tensor.name] = array
    return state


def states_are_additive(exchange: Exchange) -> bool:
    """Whether only the sum over ranks of each state matters, so that some ranks may start from zero.

    Args:
        exchange: The exchange with the memories.

    Returns:
        True if all that the memories hold counts by its sum over ranks only.
    """
    return all(field in bucket.memory.summed_fields for bucket in exchange.buckets for field in bucket.memory.states)


def gather_and_redistribute(exchange: Exchange, own: dict | None, prefix: str) -> dict:
    """Gather the memories of the ranks that have one, and compute what each rank takes over: a collective.

    This goes tensor by tensor, so that no rank ever holds more than one tensor of all ranks.

    Args:
        exchange: This rank's exchange.
        own: This rank's memory, or None if it has none.
        prefix: What the collectives' names begin with.

    Returns:
        The state for Exchange.load_state_dict, without the step.
    """
    transport = exchange.transport
    state: dict = {}
    for bucket in exchange.buckets:
        fields = [*bucket.memory.states]
        for tensor in bucket.tensors if fields and bucket.size else ():
            name = f"{prefix}.{tensor.name}"
            theirs = [
                {field: array for field, array in zip(fields, arrays, strict=True)}
                for arrays in _gather(transport, name, own, fields, tensor)
            ]
            for field, array in bucket.memory.redistribute(theirs, transport.size).items():
                state.setdefault(field, {})[tensor.name] = array
        for tensor in bucket.tensors:
            for field, size in _shared_sizes(exchange, bucket, tensor).items():
                array = (own or {}).get(field, {}).get(tensor.name, np.empty(0, np.float32))
                joined = transport.allgather(f"{prefix}.{tensor.name}.{field}", _bytes(array)).wait().view(np.float32)
                if joined.size:  # the same on all that have one: the first of them
                    state.setdefault(field, {})[tensor.name] = joined[:size].copy()
    return state


def _shared_sizes(exchange: Exchange, bucket: Bucket, tensor: Tensor) -> dict[str, int]:
    """By field, the numbers of elements of what is the same on all ranks."""
    sizes = dict.fromkeys(bucket.memory.shared, bucket.memory.shared_size(tensor))
    if bucket.declared.lowrank is not None:
        _, columns, rank = bucket.declared.lowrank.factorization(tensor.shape)
        sizes[WARM_STARTS] = rank * columns
    if exchange.schedules.keeps_densities and bucket.declared.has_density:
        sizes[DENSITY] = 1
    return sizes


def _gather(transport: Transport, name: str, own: dict | None, fields: list[str], tensor: Tensor) -> list[np.ndarray]:
    """float32[fields, size] of every rank that has a memory."""
    mine = [(own or {}).get(field, {}).get(tensor.name, np.zeros(tensor.size, np.float32)) for field in fields]
    payload = np.empty(0, np.uint8) if own is None else _bytes(np.concatenate(mine))
    joined = transport.allgather(name, payload).wait()
    return list(joined.view(np.float32).reshape(-1, len(fields), tensor.size))


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array, np.float32).view(np.uint8)
