"""Which client of grace_ext.federated a node of Flower is."""

import logging

import pytest
from support import launch

launch.skip_without("flwr")

from grace_ext import ConfigError  # noqa: E402
from grace_ext.adapters._flower.nodes import Nodes  # noqa: E402


def test_nodes_are_numbered_as_they_appear():
    nodes = Nodes(3, None, None)
    assert [nodes.number(node) for node in (2**63, 5, 2**63, 9)] == [0, 1, 0, 2]
    assert nodes.known([9, 4, 5]) == {1, 2} and nodes.all == {0, 1, 2}
    assert nodes.rounds == {0: None, 1: None, 2: None}


def test_more_nodes_than_may_take_part_have_no_number(caplog):
    nodes = Nodes(1, None, 0)
    with caplog.at_level(logging.WARNING, "grace_ext"):
        assert nodes.number(7) == 0 and nodes.number(8) is None and nodes.number(7) == 0
    assert "node 8 is not asked: most_nodes=1 have taken part already" in caplog.text
    assert nodes.rounds == {0: 0}
    with pytest.raises(ConfigError, match="most_nodes=0; allowed: from 1 on"):
        Nodes(0, None, None)


def test_with_weights_by_node_only_those_take_part(caplog):
    nodes = Nodes(10, {40: 1.0, 30: 2.0}, None)
    with caplog.at_level(logging.WARNING, "grace_ext"):
        assert (nodes.most, nodes.number(30), nodes.number(40), nodes.number(50)) == (2, 1, 0, None)
    assert "node 50 is not asked: it has no weight" in caplog.text
