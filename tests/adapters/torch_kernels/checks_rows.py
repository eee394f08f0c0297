"""Tables whose gradients come as rows on an accelerator: the host's bits."""

import numpy as np
import torch
from accelerator import Accelerator
from inputs import STREAM, same, tensor, vector
from support.checking import check, raises
from support.exchanges import arrays_of
from support.in_process_ranks import on_all_ranks
from support.row_exchanges import ROWS, WIDTH, make, rows_of

from grace_ext import ConfigError
from grace_ext.adapters._torch.device import on_its_device
from grace_ext.adapters._torch.device_rows import DeviceRowBucket
from grace_ext.adapters._torch.kernels import rows
from grace_ext.exchange.row_buckets import RowGradient
from grace_ext.kernels.rows import add_rows

SPECS = ["topk:0.1/rice/qsgd:7", "topk:0.3:per=tensor/auto/lloyd", "dense/qsgd:4", "dense/fp16"]


@check
def sums_of_rows_are_the_host_s_in_every_bit():
    for count, width, numbers in ((1, 1, [0]), (5, 130, [3, 3, 0, 3, 0]), (9, 7, [2, 1, 2, 2, 5, 1, 9, 2, 0]), (0, 4, [])):
        values = vector("huge", count * width).reshape(count, width)
        touched, slots = np.unique(np.array(numbers, np.int64), return_inverse=True)
        expected, out = np.zeros((touched.size, width), np.float32), torch.full((touched.size * width,), torch.nan)
        add_rows(expected, slots, values)
        found, order, starts = rows.group(np.array(numbers, np.int64))
        assert np.array_equal(found, touched)
        rows.sum_into(out, tensor(values), tensor(order), tensor(starts))
        assert same(out, expected), (count, width)


def placed(given, on_device):
    return RowGradient(torch.from_numpy(given.indices), torch.from_numpy(given.values)) if on_device else given


def train(spec, memory, on_device):
    """Rows and values of some steps: in the second rank 1 touches nothing, in the third it has a NaN; and what memories keep."""

    def work(transport):
        exchange, results = make(transport, spec, memory=memory), []
        if on_device:
            [bucket] = exchange.buckets
            assert DeviceRowBucket.fits(bucket.compressor, bucket.communicator, bucket.memory)
            exchange.set_buckets([DeviceRowBucket.made_of(bucket)])
        [bucket] = exchange.buckets
        for step in range(4):
            given = rows_of(transport.rank, step)
            if transport.rank == 1 and step == 1:
                given = RowGradient(np.empty(0, np.int64), np.empty((0, WIDTH), np.float32))
            if transport.rank == 1 and step == 2:
                given.values[0, 0] = np.nan
            out = RowGradient()
            exchange.start(bucket, lambda given=given: placed(given, on_device))
            exchange.finish(bucket, out)
            assert exchange.end_step() == (step != 2)
            results.append((out.indices.tobytes(), out.values.tobytes()))
        return results, {name: array.tobytes() for name, array in arrays_of(exchange).items()}

    return on_all_ranks(work, 2)


@check
def steps_of_tables_are_the_host_s_in_every_bit():
    for spec in SPECS:
        for memory in ("residual", "residual:decay=0.5:bits=8", "none"):
            expected = train(spec, memory, False)
            assert train(spec, memory, True) == expected, (spec, memory)
            assert expected[0][0] == expected[1][0]


@check
def what_is_no_gradient_of_the_table_is_refused():
    def work(transport):
        bucket = DeviceRowBucket.made_of(make(transport, SPECS[0], memory="none").buckets[0])
        for indices, width, text in (([0, ROWS], WIDTH, f"has a row {ROWS}"), ([0, 1], WIDTH + 1, "has 2 rows and")):
            given = RowGradient(torch.tensor(indices), torch.zeros(len(indices), width))
            with raises(ConfigError, text):
                bucket.start(transport, lambda given=given: given, STREAM)

    on_all_ranks(work, 1)


@check
def tables_are_theirs_and_no_dense_bucket_s():
    def work(transport):
        for spec, kind in (("topk:0.1/rice/qsgd:7", DeviceRowBucket), ("dense/raw", None)):
            bucket = make(transport, spec, memory="none").buckets[0]
            assert type(on_its_device(bucket, "device", None)) is (kind or type(bucket))
        refused = make(transport, "randomk:0.2", memory="none").buckets[0]
        with raises(ConfigError, "of gradients that come as rows, the top-k or all of them"):
            on_its_device(refused, "device", None)

    on_all_ranks(work, 1)


@check
def numbers_of_rows_cross_and_the_container():
    def work(transport):
        bucket = DeviceRowBucket.made_of(make(transport, SPECS[0], memory="residual").buckets[0])
        given = rows_of(0, 0)
        with Accelerator() as accelerator:
            indices, values = torch.from_numpy(given.indices).to("cpu"), torch.from_numpy(given.values).to("cpu")
            pending = bucket.start(transport, lambda: RowGradient(indices, values), STREAM)
        assert accelerator.crossings.nbytes <= 8 * given.indices.size + 1.5 * pending.container.size + 256

    on_all_ranks(work, 1)
