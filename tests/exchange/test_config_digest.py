"""Ranks whose configurations differ are told so."""

import numpy as np
import pytest

import grace_ext
from grace_ext import ConfigError
from grace_ext.exchange.buckets import Tensor
from grace_ext.exchange.engine import Exchange
from grace_ext.pipeline.spec import parse_stage
from grace_ext.transport import InProcessGroup


@pytest.mark.parametrize("differs", ["seed", "weight"])
def test_ranks_with_another_seed_or_weight_are_told(differs):
    """Random positions and rounding follow the seed; all ranks have to draw alike."""

    def layout(**options):
        exchange = Exchange(InProcessGroup(2).transport(0), "residual", **{"weight": 0.5, "seed": 0, **options})
        exchange.set_buckets(
            [
                exchange.bucket(
                    "bucket",
                    [Tensor("a", 50, 1)],
                    grace_ext.compressor("randomk:0.1"),
                    parse_stage("communicator", "allgather"),
                )
            ]
        )
        return exchange, exchange.config_digest()

    (exchange, first), (_, same), (_, other) = layout(), layout(), layout(**{differs: 1})
    exchange.check_config_digests(np.concatenate([first, same]))
    with pytest.raises(ConfigError, match=r"ranks \[1\] have other parameters, specs or options than rank 0"):
        exchange.check_config_digests(np.concatenate([first, other]))
