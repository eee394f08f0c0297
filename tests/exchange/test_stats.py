"""Statistics count what was sent, and name the codecs."""

import numpy as np
from support.exchanges import make, step
from support.in_process_ranks import gradient, on_all_ranks

import grace_ext


def test_statistics_count_what_was_sent():
    def work(transport):
        exchange = make(transport)
        for i in range(3):
            step(exchange, gradient(i))
        return exchange.stats()

    for stats in on_all_ranks(work):
        assert stats["steps"] == 3 and stats["bytes_in"] == 3 * 4 * 5000
        blob = grace_ext.compressor("topk:0.1/rice/qsgd:7").compress(gradient(0), name="a")
        assert abs(stats["last_step"]["bytes_out"] - blob.size) < 40
        assert stats["compressed"]["ratio"] == stats["ratio"] == stats["bytes_in"] / stats["bytes_out"]
        assert {"select", "index", "value", "container", "residual", "exchange", "decode"} <= stats["seconds"].keys()
        assert stats["index_codecs"] == {"rice": 3} and stats["last_step"]["index_codecs"] == {"rice": 1}


def test_statistics_name_the_codecs_that_auto_chose():
    def work(transport):
        exchange = make(transport, "topk:0.5/auto/raw")
        clustered = (np.arange(5000) % 1000 < 300).astype(np.float32)
        for given in (clustered, gradient(1), np.full(5000, np.nan, np.float32)):
            step(exchange, given)
        return exchange.stats()["index_codecs"]

    for codecs in on_all_ranks(work):
        assert codecs == {"rle": 1, "bitmap": 1}
