"""tf.GradientTape whose gradients are compressed and averaged over ranks."""

import weakref
from typing import TYPE_CHECKING, Any

import horovod.tensorflow as hvd
import tensorflow as tf

# The question whether a tape records has no public name.
from tensorflow.python.eager.record import could_possibly_record

from grace_ext import ConfigError
from grace_ext.pipeline.compressor import Compressor

from .._common.subclassing import subclass
from .eager import has_others
from .options import Options
from .reduce import Reducer

_reducers: dict[tuple, Reducer] = {}  # by options and sources
_loaded: dict[tuple, tuple] = {}  # by sources, arguments of load_state_dict of those that there are not yet


def DistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: str | dict | Compressor | type | None = None,
    sparse_as_dense: bool = False,
    op: int = hvd.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: list | int | None = None,
    process_set: hvd.ProcessSet = hvd.global_process_set,
    scale_local_gradients: bool = True,
    **options: Any,
) -> Any:
    """Wrap a tf.GradientTape so that `gradient` gives gradients that are compressed, exchanged and averaged over ranks.

    A drop-in for hvd.DistributedGradientTape: the named arguments are Horovod's, in its order, the others those of
    CompressionOptions. Works eagerly and inside tf.function. Buckets follow the reverse order of the sources.

    The memory outlives the tape: tapes over the same variables with the same options go on with the same one.

    Args:
        gradtape: The tape to wrap.
        device_dense: Only "" is allowed, because the codecs run on the host.
        device_sparse: The same.
        compression: See CompressionOptions.
        sparse_as_dense: tf.IndexedSlices are made dense first. Otherwise they stay sparse: duplicate rows are summed, and
            the spec's sparsifier works on the rows that are there.
        op: hvd.Average or hvd.Sum.
        gradient_predivide_factor: With hvd.Average, gradients are divided by this before the sum, and by the rest of the
            number of ranks after it.
        num_groups: A number of equal groups, if `groups` is not given.
        groups: See CompressionOptions.
        process_set: The ranks that exchange gradients.
        scale_local_gradients: Gradients of sources that `register_local_source` excludes from the exchange are divided by
            the number of ranks.
        **options: All others of CompressionOptions.

    Returns:
        The wrapped tape, an instance of the given tape's class.

    Raises:
        ConfigError: Something cannot be honoured: op=Adasum, complex variables, specs that differ between ranks, XLA.
        TypeError: An option is unknown.
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
    shared.choose_defaults(None, (process_set.rank(), process_set.size()))
    shared.refuse_steps_in_memory("use DistributedOptimizer")
    if not isinstance(gradtape, tf.GradientTape) or hasattr(type(gradtape), "_plain"):
        raise ConfigError(f"a tf.GradientTape that is not wrapped yet was expected, not {gradtape!r}")
    cls: Any = subclass(type(gradtape), _WrappedTape, _options=shared, _local_sources=[], _reducer=None)
    wrapped = cls.__new__(cls)
    wrapped.__dict__ = gradtape.__dict__  # one of the two can end what the other has begun, as at the end of a with block
    return wrapped


class _WrappedTape:
    """What a wrapped tape does differently from the class that was wrapped, its `_plain`. Each tape has a class of its own."""

    if TYPE_CHECKING:  # what the class that is made of it has
        _plain: Any
        _options: Options
        _local_sources: list
        _reducer: Reducer | None

    def gradient(self, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute gradients as tf.GradientTape.gradient does, averaged over ranks.

        Args:
            target: See tf.GradientTape.
            sources: See tf.GradientTape.
            *args: See tf.GradientTape.
            **kwargs: See tf.GradientTape.

        Returns:
            Gradients in the same structure as sources.
        """
        gradients = tf.nest.flatten(self._plain.gradient(self, target, sources, *args, **kwargs))
        flat_sources = tf.nest.flatten(sources)
        reducer = type(self)._reducer = _reducer_of(self._options, flat_sources)
        reduced = reducer.reduce(gradients, flat_sources, self._local_sources)
        if reducer.active and (could_possibly_record() or not tf.executing_eagerly()):
            reduced = [one if given is None else _last(one) for given, one in zip(gradients, reduced, strict=True)]
        return tf.nest.pack_sequence_as(sources, reduced)

    def jacobian(self, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        """Not supported, because each of its rows would be exchanged as if it were the gradients of a step.

        Args:
            target: See tf.GradientTape.
            sources: See tf.GradientTape.
            *args: See tf.GradientTape.
            **kwargs: See tf.GradientTape.

        Raises:
            ConfigError: There is another rank.
        """
        self._refuse_rows("jacobian")
        return self._plain.jacobian(self, target, sources, *args, **kwargs)

    def batch_jacobian(self, target: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
        """Not supported: see jacobian.

        Args:
            target: See tf.GradientTape.
            source: See tf.GradientTape.
            *args: See tf.GradientTape.
            **kwargs: See tf.GradientTape.

        Raises:
            ConfigError: There is another rank.
        """
        self._refuse_rows("batch_jacobian")
        return self._plain.batch_jacobian(self, target, source, *args, **kwargs)

    def _refuse_rows(self, method: str) -> None:
        if has_others(self._options.process_set):
            raise ConfigError(
                f"{method} of a DistributedGradientTape would exchange row by row: call it on the tape that was wrapped, and "
                f"hvd.allreduce with what it gives"
            )

    def register_local_source(self, source: Any) -> None:
        """Leave a source's gradient out of the exchange.

        Args:
            source: The variable.
        """
        self._local_sources.append(source)

    def compression_stats(self) -> dict:
        """Bytes, ratio and seconds per stage, in total and of the last step.

        Returns:
            What docs/observability.md describes, for the sources that `gradient` was last called with, over all
            tapes.
        """
        return {"steps": 0} if self._reducer is None else self._reducer.stats()


def _last(gradient: Any) -> Any:
    """The gradient, of which there is no further derivative: TensorFlow would take it to be zero without a word."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(_last(gradient.values), gradient.indices, gradient.dense_shape)

    @tf.custom_gradient
    def identity(values: Any) -> Any:
        def refuse(*upstream: Any) -> None:
            raise ConfigError(
                "derivatives of gradients that a DistributedGradientTape has exchanged are not supported: take the inner gradients "
                "from a plain tf.GradientTape, and wrap the outer tape"
            )

        return tf.identity(values), refuse

    return identity(gradient)


def compression_stats(sources: Any) -> dict:
    """The statistics of the tapes over these sources, for loops whose tape is inside a tf.function.

    Args:
        sources: What `gradient` was called with.

    Returns:
        What docs/observability.md describes. If there were tapes with different options, that of the last ones.
    """
    reducer = _last_reducer(sources)
    return {"steps": 0} if reducer is None else reducer.stats()


def compression_state(sources: Any) -> dict:
    """This rank's state of the tapes over these sources: what their memories hold, and the number of the step.

    Each rank saves its own between two steps. The variables are not in it.

    Args:
        sources: What `gradient` was called with.

    Returns:
        A dict of numpy arrays, numbers and strings, with "rank" and "ranks" in it. If there were tapes with different
        options, the state of the last ones.

    Raises:
        ConfigError: No tape over these sources has given gradients yet.
    """
    reducer = _last_reducer(sources)
    if reducer is None:
        raise ConfigError("compression_state: no DistributedGradientTape has given gradients of these sources yet")
    return reducer.state_dict()


def load_compression_state(sources: Any, state: dict | list[dict] | None, on_resize: str | None = None) -> None:
    """Let the tapes over these sources go on from what compression_state returned.

    Call it on all ranks, before the first step or later. The log "grace_ext" says what was done.

    Args:
        sources: What `gradient` will be called with.
        state: This rank's own state, or a list of all ranks' states, whose number may differ from that of the ranks now; None
            on a rank that has none.
        on_resize: For states of another number of ranks: "reset", memories start from zero; "redistribute", each rank takes
            an equal part of the sum of residuals; None: redistribute if the states of all ranks were given.

    Raises:
        ConfigError: The states do not fit together or to the sources. Raised here if there was a step, otherwise in the first.
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


def _last_reducer(sources: Any) -> Reducer | None:
    wanted = _identities(tf.nest.flatten(sources))
    found = [reducer for (_, identities), reducer in _reducers.items() if identities == wanted]
    return found[-1] if found else None


def _reducer_of(options: Options, sources: list) -> Reducer:
    """The one that all tapes over these sources share, as long as the variables among them live."""
    key = options.key(), _identities(sources)
    if key not in _reducers:
        _check_not_recreated(options, sources)
        _reducers[key] = Reducer(options)
        if key[1] in _loaded:
            with tf.init_scope():
                _reducers[key].load_state_dict(*_loaded.pop(key[1]))
        for source in filter(_is_variable, sources):
            weakref.finalize(source, _reducers.pop, key, None)
    return _reducers[key]


def _check_not_recreated(options: Options, sources: list) -> None:
    """Raises ConfigError where a loop over variables makes an observer or the like at every step."""
    wanted = _identities(sources)
    for (_, identities), reducer in _reducers.items() if any(map(_is_variable, sources)) else ():
        if identities == wanted and (name := options.recreated_option(reducer.options)):
            raise ConfigError(
                f"{name}: this tape has another object than an earlier one over the same sources, whose other "
                f"options are the same. Its memory would begin at zero, and what was not sent so far would "
                f"be lost: make the object once, before the loop, and give it to all these tapes"
            )


def _identities(sources: list) -> tuple:
    """Variables are told apart; tensors, which every call makes anew, by their places."""
    return tuple(id(source) if _is_variable(source) else place for place, source in enumerate(sources))


def _is_variable(source: Any) -> bool:
    return hasattr(source, "assign")
