"""Which ranks share a host."""

import numpy as np
import pytest

from grace_ext.transport import topology


def digest(monkeypatch, name):
    monkeypatch.setenv(topology.HOSTNAME_VARIABLE, name)
    return topology.own_host_digest()


def test_a_host_has_one_digest_and_others_have_others(monkeypatch):
    monkeypatch.delenv(topology.HOSTNAME_VARIABLE, raising=False)
    own = topology.own_host_digest()
    assert own.dtype == np.uint8 and own.shape == (topology.HOST_BYTES,)
    assert np.array_equal(own, topology.own_host_digest())
    assert not np.array_equal(own, digest(monkeypatch, "rack7"))
    assert np.array_equal(digest(monkeypatch, "rack7"), digest(monkeypatch, "rack7"))


@pytest.mark.parametrize("what", ["gethostname", "boot_id"])
def test_hosts_of_the_same_name_or_the_same_boot_are_told_apart(monkeypatch, what):
    monkeypatch.delenv(topology.HOSTNAME_VARIABLE, raising=False)
    own = topology.own_host_digest()
    monkeypatch.setattr(topology.socket if what == "gethostname" else topology, what, lambda: "another")
    assert not np.array_equal(own, topology.own_host_digest())


def test_hosts_are_numbered_in_the_order_of_their_first_ranks(monkeypatch):
    names = ["b", "a", "b", "c", "a"]
    gathered = np.stack([digest(monkeypatch, name) for name in names])
    assert topology.number_hosts(gathered) == (0, 1, 0, 2, 1)
    assert topology.number_hosts(gathered[:1]) == (0,)


def test_a_machine_without_a_boot_id(monkeypatch):
    def missing(*_):
        raise FileNotFoundError

    monkeypatch.setattr("builtins.open", missing)
    assert topology.boot_id() == ""
