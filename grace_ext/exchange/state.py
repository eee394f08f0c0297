"""What an exchange remembers between steps: the memories of its buckets, and the factors of warm starts."""

import numpy as np

from .._util.shared_states import SharedStates
from ..errors import ConfigError
from ..memory.base import Memory
from ..policy.memories import Memories
from .buckets import Bucket, Tensor

WARM_STARTS = "lowrank"  # key in state dicts, beside the fields of the memories
DENSITY = "density"  # of schedules that keep it


class ExchangeState:
    """The memories of an exchange's buckets, and the factors of warm starts.

    The states of a step are a transaction: `commit` puts those of the next step in force, `rollback` keeps the old ones.

    Args:
        memories: Which memory each tensor has.
    """

    def __init__(self, memories: Memories):
        self.memories = memories
        self.warm_starts = SharedStates()
        self._buckets: list[Bucket] = []
        self._memories: list[Memory] = []  # the memories of the buckets, without repetition

    def set_buckets(self, buckets: list[Bucket]) -> None:
        """Replace the buckets; each tensor's state follows it into its new one.

        Args:
            buckets: The buckets of all further steps.
        """
        state = self.state_dict(take=True)
        self._buckets = buckets
        for bucket in buckets:
            bucket.memory.set_tensors(bucket.name, bucket.tensors)
        self._memories = list({id(bucket.memory): bucket.memory for bucket in buckets}.values())
        self.load_state_dict(state, take=True)

    @property
    def shared_fields(self) -> list[str]:
        """The keys in state dicts of what is the same on all ranks."""
        return sorted({WARM_STARTS, DENSITY}.union(*(memory.shared for memory in self._memories)))

    def commit(self) -> None:
        """Put the states of the next step in force."""
        for memory in self._memories:
            memory.commit()
        self.warm_starts.commit()

    def rollback(self) -> None:
        """Keep the states as they were before the step."""
        for memory in self._memories:
            memory.rollback()
        self.warm_starts.rollback()

    def state_dict(self, take: bool = False) -> dict:
        """Copy the states.

        Args:
            take: Whether to remove those of the memories, which needs no copies.

        Returns:
            {field: {tensor name: float32[size]}}. Fields are those of the memories ("residual", …) and shared ones.
        """
        state = {}
        if factors := self.warm_starts.state_dict():
            state[WARM_STARTS] = factors
        for memory in self._memories:
            for field, shared in memory.shared.items():
                if arrays := shared.state_dict():
                    state.setdefault(field, {}).update(arrays)
        by_bucket = {id(memory): memory.state_dict(take) for memory in self._memories}
        for bucket in self._buckets:
            ends = np.cumsum(bucket.sizes)[:-1]
            for field, array in by_bucket[id(bucket.memory)].get(bucket.name, {}).items():
                parts = zip((tensor.name for tensor in bucket.tensors), np.split(array, ends), strict=True)
                state.setdefault(field, {}).update(parts)
        return state

    def load_state_dict(self, state: dict, take: bool = False) -> None:
        """Load what `state_dict` returned. Tensors without a state start from zero.

        Args:
            state: The states; fields that no memory here has are left out.
            take: Whether to remove those of the memories from `state` as they are loaded, which frees what they lie in.

        Raises:
            ConfigError: A state has another size than its tensor.
        """
        by_memory: dict[int, dict] = {id(memory): {} for memory in self._memories}
        for bucket in self._buckets:
            for field in bucket.memory.states:
                given = state.get(field, {})
                if any(tensor.name in given for tensor in bucket.tensors):
                    find = given.pop if take else given.get
                    parts = [_fitting(field, tensor, find(tensor.name, None)) for tensor in bucket.tensors]
                    by_memory[id(bucket.memory)].setdefault(bucket.name, {})[field] = np.concatenate(parts)
        for memory in self._memories:
            memory.load_state_dict(by_memory[id(memory)], copy=False)
            names = {tensor.name for bucket in self._buckets if bucket.memory is memory for tensor in bucket.tensors}
            for field, shared in memory.shared.items():
                given = state.get(field, {})
                shared.load_state_dict({name: given[name] for name in given.keys() & names})
        self.warm_starts.load_state_dict(state.get(WARM_STARTS, {}))


def _fitting(field: str, tensor: Tensor, state: np.ndarray | None) -> np.ndarray:
    if state is None:
        return np.zeros(tensor.size, np.float32)
    if np.size(state) != tensor.size:
        raise ConfigError(f"{field} of {tensor.name!r} has {np.size(state)} elements, the tensor {tensor.size}")
    return np.asarray(state, np.float32).reshape(-1)
