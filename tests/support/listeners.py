"""The listeners of an exchange, one by one."""

from grace_ext.observe.listener import Listeners


def listener_of(exchange, kind):
    (found,) = (one for one in exchange.listeners if isinstance(one, kind))
    return found


def without(exchange, kind) -> None:
    """From here on the exchange does without its listener of that class."""
    exchange._listeners = Listeners([one for one in exchange.listeners if not isinstance(one, kind)])
