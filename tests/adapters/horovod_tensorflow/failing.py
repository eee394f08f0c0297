"""A job in which rank 1 raises: failing.py WHERE, in the user's code or inside the exchange."""

import sys

import horovod.tensorflow as hvd
import tensorflow as tf

from grace_ext.adapters._tensorflow import gradient_tape
from grace_ext.adapters.horovod_tensorflow import DistributedGradientTape

hvd.init()
weights = tf.Variable(tf.zeros((300, 300)))


@tf.function
def train(inputs):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(inputs @ weights)
    gradient = DistributedGradientTape(tape).gradient(loss, weights)
    weights.assign_sub(0.1 * gradient)


for step in range(20):
    if step == 5 and hvd.rank() == 1:
        if sys.argv[1] == "user":
            raise RuntimeError("rank 1 gives up")
        (reducer,) = gradient_tape._reducers.values()
        (layout,) = reducer._layouts.values()
        layout.exchange.buckets[0].start = None  # calling it raises in the worker thread
    train(tf.random.normal((4, 300)))
print("this line must not be reached")
