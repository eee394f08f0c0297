"""Buckets that bypass the exchange."""

from grace_ext.communicators.base import Pending
from grace_ext.exchange.bypass import BypassPending


def test_a_bypass_is_told_from_what_is_compressed():
    assert BypassPending.bypasses and not Pending.bypasses and issubclass(BypassPending, Pending)
