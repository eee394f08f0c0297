"""Ranks find addresses under which they reach each other. Across hosts: tests/hosts/test_jobs_on_hosts.py."""

import concurrent.futures
import socket

import pytest

from grace_ext import ExchangeError
from grace_ext.adapters._common import addresses
from grace_ext.adapters._common.addresses import INTERFACE, agree_on_addresses
from grace_ext.transport.inprocess import InProcessGroup, InProcessTransport

RANKS = 3


@pytest.fixture(autouse=True)
def no_interface(monkeypatch):
    for variable in INTERFACE:
        monkeypatch.delenv(variable, raising=False)


def agree() -> list:
    """What each rank gets, or the error that it raises."""
    group = InProcessGroup(RANKS)

    def of(rank):
        try:
            return agree_on_addresses(InProcessTransport(group, rank), "test")
        except ExchangeError as error:
            return str(error)

    with concurrent.futures.ThreadPoolExecutor(RANKS) as threads:
        return list(threads.map(of, range(RANKS)))


def test_ranks_of_one_host_use_its_loopback_interface():
    assert agree() == [["127.0.0.1"] * RANKS] * RANKS


@pytest.mark.parametrize("variable", INTERFACE)
def test_an_interface_that_is_named_is_used(monkeypatch, variable):
    monkeypatch.setenv(variable, "lo")
    assert agree() == [["127.0.0.1"] * RANKS] * RANKS


def test_an_interface_that_is_not_there_is_refused_by_all_ranks(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none7")
    (said,) = set(agree())
    assert "ranks [1, 2] reach none of the addresses" in said and "GLOO_SOCKET_IFNAME=eth0 for example" in said


def test_the_ranks_of_the_first_host_use_the_address_that_others_have_reached(monkeypatch):
    """Ranks 1 and 2 connect to one after the other of the first one's addresses; only rank 2 is on another host."""
    ends = iter([("127.0.0.1", "127.0.0.1"), ("10.0.0.2", "10.0.0.1")])
    monkeypatch.setattr(addresses, "_reach", lambda given, port: next(ends))
    (found,) = {tuple(one) for one in agree()}
    assert sorted(found[1:]) == ["10.0.0.1", "10.0.0.2"] and found[0] == "10.0.0.1"


def test_an_address_that_nobody_listens_on_is_passed_over():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert addresses._reach(["127.0.0.9", "127.0.0.1"], port) == ("127.0.0.1", "127.0.0.1")
    assert addresses._reach(["127.0.0.1"], port) == ("", "")
