"""The versions of frameworks that the adapters were tested with; setup.cfg has the same in its extras."""

from importlib.metadata import version

from packaging.specifiers import SpecifierSet

from grace_ext import ConfigError

#: By the name of the distribution. The lowest and the newest version of each were run.
SUPPORTED = {
    "accelerate": ">=1.10,<2",
    "transformers": ">=5.20,<6",
    "lightning": ">=2.5,<2.7",
    "ray": ">=2.60,<2.61",
    "jax": ">=0.6,<0.11",
    "optax": ">=0.2.4,<0.3",
    "flwr": ">=1.42,<1.43",
}


def check_version(name: str, adapter: str | None = None) -> None:
    """Refuse a framework of a version whose internals the adapter was not tested with.

    Args:
        name: One of SUPPORTED, which is installed.
        adapter: The adapter's name; None for that of the framework.

    Raises:
        ConfigError: Its version is not supported.
    """
    found, supported = version(name), SUPPORTED[name]
    if not SpecifierSet(supported).contains(found, prereleases=True):
        raise ConfigError(
            f"{name} {found} is installed; grace_ext.adapters.{adapter or name} supports {name}{supported}: "
            f"pip install '{name}{supported}'"
        )
