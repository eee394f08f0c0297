"""The parameter dictionaries of GRACE and DeepReduce, so that their users can switch by changing one line.

GRACE: Xu et al., GRACE: a compressed communication framework for distributed machine learning, ICDCS 2021. DeepReduce:
Xu et al., NeurIPS 2021.
"""

from ..errors import ConfigError
from .compressor import make_compressor
from .params_reader import COMMUNICATORS, Reader, ratio
from .params_tensorflow import from_tensorflow

_SPARSIFIERS = ("topk", "randomk", "threshold", "dgc", "none")
_POLICIES = {
    "naive": "naive",
    "leftmost": "leftmost",
    "middle": "middle",
    "rightmost": "rightmost",
    "p0": "p0",
    "p1": "p1",
    "random": "p1",
    "p2": "p2",
    "conflict_sets": "p2",
}
#: Keys that control what grace_ext does not have: containers tell sizes, hashing needs no tables, no times are printed.
_WITHOUT_EFFECT = ("world_size", "hash_table", "micro-benchmark")


def from_params(params: dict) -> dict:
    """Translate a parameter dictionary of GRACE or DeepReduce into arguments of a DistributedOptimizer.

        optimizer = DistributedOptimizer(optimizer, named_parameters=…, **grace_ext.from_params(params))

    The communicator `broadcast` becomes allgather, which gives the same result. If `params` names none, it is allreduce
    where values can be summed, and otherwise allgather. GRACE's signsgd and signum take the majority of the signs, which is
    communicator `majority`. Its efsignsgd multiplies by the learning rate before and divides by it after compression, which
    cancels out; the result is the mean over ranks, as in GRACE for TensorFlow (GRACE for PyTorch has their sum).

    Args:
        params: What GRACE's grace_from_params or DeepReduce's deepreduce_from_params take, or, with the key
            `compress_method`, the parameters of DeepReduce for TensorFlow.

    Returns:
        {"compression": spec, "memory": …, "communicator": …}; with signsgd and signum also "rules", because small tensors are
        put to the vote as well.

    Raises:
        ConfigError: The method does not exist, or a key is unknown or has no meaning beside the others.
    """
    if not isinstance(params, dict):
        raise ConfigError(f"params is a dictionary, not {type(params).__name__}")
    read = Reader(params)
    if "compress_method" in params:
        return from_tensorflow(read)
    method = read("compressor", "none")
    if not isinstance(method, str) or method.lower() not in _METHODS:
        raise ConfigError(f"params: compressor={method!r} is not there; known: {', '.join(sorted(_METHODS))}")
    method = method.lower()
    spec = _METHODS[method](read)
    wrapped = read.choice("deepreduce", None, {None: None, "index": "index", "value": "value", "both": "both"})
    if wrapped:
        if method not in _SPARSIFIERS:
            raise ConfigError(
                f"params: deepreduce={wrapped!r} needs one of {', '.join(_SPARSIFIERS)} as compressor, not {method!r}"
            )
        spec = "nonzero" if method == "none" else spec
        index = read.choice("index", "bloom", _INDEX)(read) if wrapped != "value" else "auto"
        value = read.choice("value", "polyfit", _VALUE)(read) if wrapped != "index" else "raw"
        spec = f"{spec.split('/')[0]}/{index}/{value}"
    found = {"compression": spec, "memory": _memory(read, method)}
    communicator = read.choice("communicator", None, {None: None, **COMMUNICATORS})
    for key in _WITHOUT_EFFECT:
        read(key, None)
    read.finish()
    if method in _VOTES:
        if communicator == "allreduce":
            raise ConfigError(
                f"params: {method} takes the majority of signs, which an allreduce cannot: communicator='allgather'"
            )
        return {**found, "communicator": "majority", "rules": {"*": spec}}
    made = make_compressor(spec)
    return {**found, "communicator": communicator or ("allreduce" if made.reducible_dtype or made.lowrank else "allgather")}


def _memory(read: Reader, method: str) -> str:
    """Return the memory; that of some methods is a part of what GRACE has in the compressor."""
    if method == "signsgd":
        return read.choice("memory", "none", {"none": "none"})
    if method == "signum":
        read.choice("memory", "none", {"none": None})
        return f"signum:{read('momentum', 0.9)}"
    if method == "efsignsgd":
        read("lr", None)
        return read.choice("memory", None, {"efsignsgd": "residual"})
    return read.choice("memory", "none", _MEMORIES)(read)


def _threshold(read: Reader) -> str:
    value = read("threshold", 256)
    return "nonzero" if value == 0 else f"threshold:{value}"


def _qsgd(read: Reader, default: int) -> str:
    return f"qsgd:levels={read('quantum_num', default)}:norm=l2:bucket={read('bucket_size', 512)}"


def _bloom(read: Reader) -> str:
    policy = read.choice("policy", "leftmost", _POLICIES)
    rate = read("fpr", None)
    if rate is None:  # as DeepReduce has it: a tenth of the density
        rate = 0.1 * float(ratio(read))
    return f"bloom:{policy}:fpr={rate:g}"


def _skcompress(read: Reader) -> str:
    sparsifier = read.choice("sparsifier", "threshold", {"threshold": _threshold, "topk": lambda r: f"topk:{ratio(r)}"})
    return f"{sparsifier(read)}/huffman/sketchml:{read('num_quantiles', 64)}:entropy=huffman"


_METHODS = {
    "none": lambda read: "dense/raw",
    "fp16": lambda read: "dense/fp16",
    "topk": lambda read: f"topk:{ratio(read)}",
    "randomk": lambda read: f"randomk:{ratio(read)}",
    "dgc": lambda read: f"dgc:{ratio(read)}",
    "threshold": _threshold,
    "qsgd": lambda read: f"dense/{_qsgd(read, 256)}",
    "terngrad": lambda read: "dense/terngrad",
    "onebit": lambda read: "dense/onebit",
    "natural": lambda read: "dense/natural",
    "u8bit": lambda read: "dense/minmax:8",
    "powersgd": lambda read: f"powersgd:{read('compress_rank', 1)}",
    "sketch": lambda read: f"dense/sketchml:{read('quantiles', 64)}",
    "sketchml": lambda read: f"dense/sketchml:{read('quantiles', 64)}",
    "3lc": lambda read: f"dense/threelc:{read('sparsity_multiplier', 1.0)}",
    "signsgd": lambda read: "dense/sign:one",
    "signum": lambda read: "dense/sign:one",
    "efsignsgd": lambda read: "dense/sign",
    "adaq": lambda read: f"adaq:{ratio(read)}/onebit:0",
    "inceptionn": lambda read: f"dense/inceptionn:{read('error_bound', 2e-10)}",
    "skcompress": _skcompress,
    "skcompresscpu": _skcompress,
}
_MEMORIES = {
    "none": lambda read: "none",
    "residual": lambda read: "residual",
    "powersgd": lambda read: "residual",
    "dgc": lambda read: f"dgc:{read('momentum', 0.9)}",
}
_VOTES = ("signsgd", "signum")
_INDEX = {
    "bloom": _bloom,
    "bloom_cpu": _bloom,
    "rle": lambda read: "rle",
    "huffman": lambda read: "huffman:bytes",
    "rlhff": lambda read: "huffman",
}
_VALUE = {
    "polyfit": lambda read: f"polyfit:{read('poly_degree', 5)}",
    "polyfit_cpu": lambda read: f"polyfit:{read('poly_degree', 5)}",
    "dexp": lambda read: "dexp",
    "doubleexp": lambda read: "dexp",
    "gzip": lambda read: "deflate",
    "deflate": lambda read: "deflate",
    "qsgd": lambda read: _qsgd(read, 127),
    "sketch": lambda read: f"sketchml:{read('num_quantiles', 64)}",
}
