"""One exchange of a communicator between ranks of this process."""

import numpy as np

import grace_ext
from grace_ext._util.rng import Stream
from grace_ext.pipeline import spec
from support.in_process_ranks import on_all_ranks


def exchange(communicator, compressor, gradients, weight=1.0):
    communicator, compressor = spec.parse_stage("communicator", communicator), grace_ext.compressor(compressor)

    def work(transport):
        mine = gradients[transport.rank].copy()
        pending = communicator.start(transport, "bucket", compressor, mine, None, Stream(rank=transport.rank))
        out = np.full(mine.size, 7, np.float32)
        finite = communicator.finish(pending, transport, out, weight)
        return out, finite, pending

    return on_all_ranks(work)
