"""What all tests share."""

import pytest
from hypothesis import settings

from grace_ext import registry

# Examples are drawn from a fixed seed: a test run says the same on every machine and on every day.
settings.register_profile("grace_ext", deadline=None, derandomize=True, max_examples=60, database=None)
settings.load_profile("grace_ext")


@pytest.fixture
def temporary_registry():
    """What a test registers is gone after it."""
    before = {kind: dict(classes) for kind, classes in registry._classes.items()}
    yield registry
    for kind, classes in before.items():
        registry._classes[kind].clear()
        registry._classes[kind].update(classes)
