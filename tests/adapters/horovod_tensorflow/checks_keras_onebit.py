"""What is checked inside the ranks of one job: the memories of 1-bit Adam and 0/1 Adam with Keras optimizers."""

import itertools

import horovod.tensorflow as hvd
import numpy as np
from checks_keras import MODES, SGD, alone, compiled, fit, flat, scaled
from checks_keras_memory import memory_of
from harness import exchange_of, same_on_all_ranks
from support.checking import check, covering, raises

from grace_ext import ConfigError
from grace_ext.adapters.horovod_tensorflow import DistributedOptimizer

ADAM = {kind: (api, api.optimizers.Adam) for kind, (api, _) in SGD.items() if kind != "tf_keras-legacy"}
ALL = {"rules": {"*": "dense/onebit"}}
#: With a large epsilon the two places that Keras and grace_ext add it at would differ.
GIVEN = {"learning_rate": 0.01, "epsilon": 1e-10}


@check
def exact_steps_are_those_of_keras_adam():
    """Eight steps in two epochs, in all modes; clipping included."""
    for kind, mode, memory in covering(itertools.product(ADAM, MODES, ("onebit_adam:8", "zeroone_adam:7"))):
        api, make = ADAM[kind]
        expected = alone(api, make(**GIVEN, global_clipnorm=0.05), epochs=2)
        optimizer = DistributedOptimizer(make(**GIVEN, global_clipnorm=0.05), memory=memory, **ALL)
        net = compiled(api, optimizer, **MODES[mode])
        fit(net, epochs=2)
        same_on_all_ranks(flat(net))
        assert np.abs(flat(net) - expected).max() < 1e-3, (kind, mode, memory, np.abs(flat(net) - expected).max())
        assert optimizer.compression_stats()["compressed"]["ratio"] == 1, (kind, mode, memory)


@check
def steps_change_in_a_graph_that_stays_the_same():
    """The same in all modes, with one bit an element after the exact steps, through one collective and through two."""
    for kind, (memory, exact, communicator) in covering(
        itertools.product(
            ADAM, (("onebit_adam:3", 3, "allgather"), ("onebit_adam:3", 3, "sharded"), ("zeroone_adam:1", 4, "allgather"))
        )
    ):
        api, make = ADAM[kind]
        results = []
        for mode in MODES:
            optimizer = DistributedOptimizer(make(**GIVEN), memory=memory, communicator=communicator, **ALL)
            net = compiled(api, optimizer, **MODES[mode])
            fit(net, epochs=2)
            same_on_all_ranks(flat(net))
            results.append(flat(net))
            case = (kind, mode, memory, communicator)
            states = memory_of(optimizer)
            moments = states["moments:hidden/kernel"]
            assert moments[:2].tolist() == [8, exact] and moments[2] > 0, (case, moments[:3])
            assert states["residual:hidden/kernel"].any(), case
            stats = optimizer.compression_stats()["compressed"]
            assert stats["ratio"] > 1.5, (case, stats)
        assert all(np.allclose(results[0], other, atol=1e-3) for other in results), (kind, memory)


@check
def a_state_goes_on_bit_by_bit_in_either_stage():
    api, make = ADAM["keras"]
    for memory in ("onebit_adam:6", "zeroone_adam:1"):

        def start(memory=memory):
            return compiled(api, DistributedOptimizer(make(**GIVEN), memory=memory, **ALL))

        first, again = start(), start()
        fit(first)
        again.set_weights(first.get_weights())
        again.optimizer.load_compression_state(first.optimizer.compression_state())
        for net in (first, again):
            fit(net)
        assert np.array_equal(flat(first), flat(again)), memory
        mine, theirs = memory_of(first.optimizer), memory_of(again.optimizer)
        assert mine.keys() == theirs.keys() and all(np.array_equal(mine[key], theirs[key]) for key in mine), memory
        same_on_all_ranks(mine["moments:hidden/kernel"])
        assert {bucket.memory.name for bucket in exchange_of(first.optimizer._grace.reducer).buckets} == {
            memory.split(":")[0]
        }


@check
def what_onebit_adam_cannot_work_with_is_refused():
    assert hvd.size() > 1
    for api, make in ADAM.values():
        for optimizer, message in (
            (api.optimizers.SGD(), "not SGD"),
            (scaled(api, make()), "not inside of another optimizer"),
            (make(amsgrad=True), "amsgrad"),
            (make(beta_2=0.99), "beta2=0.999, the optimizer 0.9 and 0.99: give both the same"),
        ):
            with raises(ConfigError, message):
                DistributedOptimizer(optimizer, memory="onebit_adam:5")
    legacy, _ = SGD["tf_keras-legacy"]
    with raises(ConfigError, "Adam or AdamW"):
        DistributedOptimizer(legacy.optimizers.legacy.Adam(), memory="onebit_adam:5")
