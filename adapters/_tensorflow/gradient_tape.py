"""tf.GradientTape whose gradients are compressed and averaged over ranks."""

import weakref

import horovod.tensorflow as hvd
import tensorflow as tf

from grace_ext import ConfigError
from grace_ext.policy import DEFAULT_SPEC

from .._common.subclassing import instance_like, subclass
from .options import Options
from .reduce import Reducer

_reducers: dict[tuple, Reducer] = {}  # by options and sources
_loaded: dict[tuple, tuple] = {}  # by sources, arguments of load_state_dict of those that there are not yet


def DistributedGradientTape(
    gradtape,
    device_dense="",
    device_sparse="",
    compression=DEFAULT_SPEC,
    sparse_as_dense=False,
    op=hvd.Average,
    gradient_predivide_factor=1.0,
    num_groups=0,
    groups=None,
    process_set=hvd.global_process_set,
    scale_local_gradients=True,
    **options,
):
    """Wrap a tf.GradientTape so that `gradient` gives gradients that are compressed, exchanged and averaged over ranks.

    A drop-in for hvd.DistributedGradientTape: the arguments up to scale_local_gradients are Horovod's, in its order. The
    result is an instance of the given tape's class. Works eagerly and inside tf.function.

    The memory outlives the tape: tapes over the same variables with the same options go on with the same one.

    compression, memory, communicator, rules, bucket_bytes, groups, seed, capture, schedule, observe: as in horovod_torch's
        DistributedOptimizer. Buckets follow the reverse order of the sources.
    sparse_as_dense: tf.IndexedSlices are made dense first. Otherwise they stay sparse: duplicate rows are summed, and the
        spec's sparsifier works on the rows that are there.
    scale_local_gradients: gradients of sources that `register_local_source` excludes from the exchange are divided by the
        number of ranks.

    Raises ConfigError for what cannot be honoured: op=Adasum, complex variables, specs that differ between ranks, XLA.
    """
    shared = Options.from_keywords(
        options,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        groups=groups or num_groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    if not isinstance(gradtape, tf.GradientTape) or hasattr(type(gradtape), "_plain"):
        raise ConfigError(f"a tf.GradientTape that is not wrapped yet was expected, not {gradtape!r}")
    wrapped = instance_like(subclass(type(gradtape), _WrappedTape), gradtape)
    wrapped._options, wrapped._local_sources, wrapped._reducer = shared, [], None
    return wrapped


class _WrappedTape:
    """What a wrapped tape does differently from the class that was wrapped, its `_plain`."""

    def gradient(self, target, sources, *args, **kwargs):
        """As tf.GradientTape.gradient: the same structure as sources, averaged over ranks."""
        gradients = tf.nest.flatten(self._plain.gradient(self, target, sources, *args, **kwargs))
        flat_sources = tf.nest.flatten(sources)
        self._reducer = _reducer_of(self._options, flat_sources)
        reduced = self._reducer.reduce(gradients, flat_sources, self._local_sources)
        return tf.nest.pack_sequence_as(sources, reduced)

    def register_local_source(self, source):
        """Leave the source's gradient out of the exchange."""
        self._local_sources.append(source)

    def compression_stats(self):
        """Bytes, ratio and seconds per stage, in total and of the last step, for the sources that `gradient` was last called
        with, over all tapes: see grace_ext.exchange.Exchange.stats."""
        return {"steps": 0} if self._reducer is None else self._reducer.stats()


def compression_stats(sources) -> dict:
    """The statistics of the tapes over these sources, for loops whose tape is inside a tf.function. If there were several
    with different options, of the last one."""
    reducer = _last_reducer(sources)
    return {"steps": 0} if reducer is None else reducer.stats()


def compression_state(sources) -> dict:
    """This rank's state of the tapes over these sources: what their memories hold, and the number of the step. A dict of
    numpy arrays, numbers and strings, with "rank" and "ranks" in it. For each rank to save between two steps; the variables
    are not in it. If there were tapes with different options, of the last ones.

    Raises ConfigError if no tape over these sources has given gradients yet.
    """
    reducer = _last_reducer(sources)
    if reducer is None:
        raise ConfigError("compression_state: no DistributedGradientTape has given gradients of these sources yet")
    return reducer.state_dict()


def load_compression_state(sources, state, on_resize=None) -> None:
    """Let the tapes over these sources go on from what compression_state returned. Call it on all ranks, before the first
    step or later.

    state: this rank's own; a list of all ranks' if there are as many ranks as there were, or others; None on a rank that has
        none.
    on_resize: for states of another number of ranks. "reset": memories start from zero; "redistribute": each rank takes an
        equal part of the sum of residuals; None: redistribute if the states of all ranks were given. The log "grace_ext"
        says what was done.

    Raises ConfigError in the first step, or here if there was one, for states that do not fit together or to the sources.
    """
    reducer = _last_reducer(sources)
    if reducer is not None:
        reducer.load_state_dict(state, on_resize)
        return
    flat = tf.nest.flatten(sources)
    key = _identities(flat)
    for source in filter(_is_variable, flat) if key not in _loaded else ():
        weakref.finalize(source, _loaded.pop, key, None)
    _loaded[key] = state, on_resize


def _last_reducer(sources) -> Reducer | None:
    wanted = _identities(tf.nest.flatten(sources))
    found = [reducer for (_, identities), reducer in _reducers.items() if identities == wanted]
    return found[-1] if found else None


def _reducer_of(options: Options, sources: list) -> Reducer:
    """The one that all tapes over these sources share, as long as the variables among them live."""
    key = options.key(), _identities(sources)
    if key not in _reducers:
        _check_not_made_anew(options, sources)
        _reducers[key] = Reducer(options)
        if key[1] in _loaded:
            with tf.init_scope():
                _reducers[key].load_state_dict(*_loaded.pop(key[1]))
        for source in filter(_is_variable, sources):
            weakref.finalize(source, _reducers.pop, key, None)
    return _reducers[key]


def _check_not_made_anew(options: Options, sources: list) -> None:
    """Raises ConfigError where a loop over variables makes an observer or the like at every step."""
    wanted = _identities(sources)
    for (_, identities), reducer in _reducers.items() if any(map(_is_variable, sources)) else ():
        if identities == wanted and (name := options.made_anew(reducer.options)):
            raise ConfigError(
                f"{name}: this tape has another object than an earlier one over the same sources, whose other "
                f"options are the same. Its memory would begin at zero, and what was not sent so far would "
                f"be lost: make the object once, before the loop, and give it to all these tapes"
            )


def _identities(sources) -> tuple:
    """Variables are told apart; tensors, which every call makes anew, by their places."""
    return tuple(id(source) if _is_variable(source) else place for place, source in enumerate(sources))


def _is_variable(source) -> bool:
    return hasattr(source, "assign")
