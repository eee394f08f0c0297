"""Fixtures of the kernels' tests."""

import pytest

from grace_ext import kernels


@pytest.fixture(scope="module")
def compiled():
    """A child process that a test forks finds all kernels compiled."""
    kernels.warmup()
