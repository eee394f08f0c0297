"""Runs the checks of Keras optimizers and callbacks in every rank: worker_keras.py OUT_FOLDER."""

import sys

import checks_keras  # noqa: F401  (importing registers its checks)
import checks_keras_memory  # noqa: F401
import checks_keras_onebit  # noqa: F401
import horovod.tensorflow as hvd
import tensorflow as tf
from support.checking import run_checks


def main() -> None:
    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    run_checks(
        sys.argv[1],
        hvd.rank(),
        hvd.size(),
        lambda name, number: int(hvd.allreduce(tf.constant(number), op=hvd.Sum, name=name)),
    )
    hvd.shutdown()


main()
