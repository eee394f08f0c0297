"""What translating parameter dictionaries takes: reading keys, and noticing those that nothing reads."""

from typing import Any

from ..errors import ConfigError

_RATIO = 0.3  # GRACE's own default
#: The names of communicators in GRACE, and here.
COMMUNICATORS = {"allreduce": "allreduce", "allgather": "allgather", "broadcast": "allgather"}


class Reader:
    """Takes values out of a dictionary and remembers which keys were read.

    Args:
        params: The dictionary, which stays as it is.
    """

    def __init__(self, params: dict):
        self._params = params
        self._read: set[str] = set()

    def __call__(self, key: str, default: Any) -> Any:
        """Return the value of a key, or the default.

        Args:
            key: The key.
            default: What counts if the dictionary does not have it.

        Returns:
            The value.
        """
        self._read.add(key)
        return self._params.get(key, default)

    def choice(self, key: str, default: Any, allowed: dict) -> Any:
        """Return what the value of a key stands for.

        Args:
            key: The key.
            default: See __call__.
            allowed: The values that it may have, and what each stands for.

        Returns:
            An entry of `allowed`.

        Raises:
            ConfigError: It has another value.
        """
        value = self(key, default)
        try:
            return allowed[value]
        except (KeyError, TypeError):
            known = ", ".join(str(one) for one in allowed)
            raise ConfigError(f"params: {key}={value!r}; allowed: {known}") from None

    def finish(self) -> None:
        """Check that all keys were read.

        Raises:
            ConfigError: Some were not.
        """
        left = [str(key) for key in self._params if key not in self._read]
        if left:
            raise ConfigError(
                f"params: {', '.join(left)}: unknown, or without a meaning for this choice; "
                f"read were: {', '.join(sorted(self._read))}"
            )


def ratio(read: Reader) -> Any:
    """Return the share of the elements to send.

    Args:
        read: The reader.

    Returns:
        The value of compress_ratio, unchecked.
    """
    return read("compress_ratio", _RATIO)
