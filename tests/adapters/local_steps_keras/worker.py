"""Runs the checks of local steps under Keras in every rank: worker.py OUT_FOLDER."""

import sys

import checks_keras_rounds  # noqa: F401  (importing registers the checks)
import horovod.tensorflow as hvd
import tensorflow as tf
from support.checking import run_checks

hvd.init()
tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(2)
run_checks(
    sys.argv[1], hvd.rank(), hvd.size(), lambda name, number: int(hvd.allreduce(tf.constant(number), op=hvd.Sum, name=name))
)
hvd.shutdown()
