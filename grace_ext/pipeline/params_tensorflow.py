"""The parameter dictionaries of DeepReduce for TensorFlow.

The keys and their values are those that its tensorflow/deepreduce.py (2021) reads. What chooses a class by the key
`compress_method` is not part of what was published: `bloom` is what versions of GRACE with a Bloom filter have, and `doubleexp` and
`polyseg` are named after its classes.
"""

from ..errors import ConfigError
from .params_reader import COMMUNICATORS, Reader, ratio


def from_tensorflow(read: Reader) -> dict:
    """Translate the parameters of DeepReduce for TensorFlow.

    Args:
        read: The reader of the dictionary.

    Returns:
        See grace_ext.pipeline.params.from_params.

    Raises:
        ConfigError: The method does not exist, or a key is unknown or has no meaning beside the others.
    """
    spec = read.choice("compress_method", None, _METHODS)(read)
    memory = "none"
    if read.choice("use_memory", False, _FLAGS):
        if read("gamma", 1.0) != 1:
            raise ConfigError(
                f"params: gamma={read('gamma', 1.0)!r}; allowed: 1, gradients are added to the residual as they are"
            )
        memory = f"residual:{read('beta', 1.0)}"
    if not read.choice("average", True, _FLAGS):
        raise ConfigError("params: average=False; allowed: True. For sums, use op=Sum of the optimizer where there is one")
    for key in _WITHOUT_EFFECT:
        read(key, None)
    communicator = read.choice("comm_method", None, {None: None, **COMMUNICATORS})
    read.finish()
    return {"compression": spec, "memory": memory, "communicator": communicator or "allgather"}


def _bloom(read: Reader) -> str:
    sparsifier = read.choice("bloom_on", "topk", _BLOOM_ON)(read)
    policy = read.choice("bloom_policy", "leftmostK", _POLICIES)
    rate = read("bloom_fpr", None)
    if rate is None:
        raise ConfigError("params: bloom_fpr is missing; DeepReduce for TensorFlow has no default for it")
    if not read.choice("bloom_false_positives_aware", True, _FLAGS):
        if policy != "leftmost":
            raise ConfigError(
                f"params: bloom_policy={read('bloom_policy', None)!r}; without bloom_false_positives_aware, allowed: leftmostK"
            )
        policy = "naive"
    return f"{sparsifier}/bloom:{policy}:fpr={rate}/raw"


def _polynomial(read: Reader) -> str:
    coefficients = read("polynomial_degree", None)
    if not isinstance(coefficients, int) or coefficients < 1:
        raise ConfigError(
            f"params: polynomial_degree={coefficients!r}; allowed: integers from 1 on, the number of coefficients"
        )
    mode = read("approximation_mode", "topk")
    return f"{f'topk:{ratio(read)}' if mode == 'topk' else 'dense'}/polyfit:{coefficients - 1}"


_FLAGS = {True: True, False: False}
_METHODS = {"bloom": _bloom, "doubleexp": lambda read: f"topk:{ratio(read)}/dexp", "polyseg": _polynomial}
_BLOOM_ON = {
    "topk": lambda read: f"topk:{ratio(read)}",
    "randomk": lambda read: f"randomk:{ratio(read)}",
    "threshold": lambda read: f"threshold:{read('threshold_val', 0.01)}",
}
_POLICIES = {"leftmostK": "leftmost", "randomK": "p1", "conflict_sets": "p2", "policy_zero": "p0"}
#: Logs, names of tensors and files, and what containers tell; the segments of the models that DeepReduce knows.
_WITHOUT_EFFECT = (
    "horovod_size",
    "tensors_size_are_same",
    "mem_mode",
    "model_name",
    "gradient_id",
    "suffix",
    "bloom_logs_path",
    "bloom_verbosity",
    "bloom_verbosity_frequency",
)
