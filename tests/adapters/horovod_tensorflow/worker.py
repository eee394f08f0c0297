"""Runs the checks of the TensorFlow adapter in every rank: worker.py OUT_FOLDER."""

import sys

import checks_auto  # noqa: F401
import checks_changing  # noqa: F401
import checks_graphs  # noqa: F401
import checks_memory  # noqa: F401
import checks_numbers
import checks_observe  # noqa: F401  (importing registers its checks)
import checks_rows  # noqa: F401
import horovod.tensorflow as hvd
import tensorflow as tf
from support.checking import run_checks


def main() -> None:
    # The numbers of ranks are not known before init, so both sizes that the tests use are described by a rule.
    hvd.init(process_sets="dynamic")
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    for odd in (0, 1):
        checks_numbers.PROCESS_SETS.append(hvd.add_process_set(list(range(odd, hvd.size(), 2))))
    run_checks(
        sys.argv[1],
        hvd.rank(),
        hvd.size(),
        lambda name, number: int(hvd.allreduce(tf.constant(number), op=hvd.Sum, name=name)),
    )
    hvd.shutdown()


main()
