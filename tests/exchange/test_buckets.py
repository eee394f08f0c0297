"""A bucket refuses what it could not carry out."""

import pytest
from support.exchanges import TENSORS

import grace_ext
from grace_ext import ConfigError
from grace_ext.exchange.buckets import Bucket
from grace_ext.memory.none import NoMemory
from grace_ext.pipeline.spec import parse_stage


def test_a_bucket_refuses_an_impossible_communicator():
    with pytest.raises(ConfigError, match="allgather"):
        Bucket("b", TENSORS, grace_ext.compressor("topk:0.1"), parse_stage("communicator", "allreduce"), NoMemory())
