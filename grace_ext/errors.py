"""The errors that grace_ext raises on purpose. Each message names what is wrong and what is allowed."""


class GraceError(Exception):
    """Base of all errors of this package."""

    # Without it tf.function turns an error in a traced step into one of its own type.
    __init__ = Exception.__init__


class ConfigError(GraceError, ValueError):
    """A spec, an option or a combination of parts cannot work."""


class ContainerError(GraceError, ValueError):
    """A byte string is not a valid container, or not the one that the caller expects."""


class ExchangeError(GraceError, RuntimeError):
    """A collective failed, timed out or returned something other than what was sent."""
