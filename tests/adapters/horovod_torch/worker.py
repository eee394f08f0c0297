"""Runs the checks of the PyTorch adapter in every rank: worker.py OUT_FOLDER [BACKEND]. BACKEND: of all that name none."""

import sys

import checks_auto  # noqa: F401  (importing registers its checks)
import checks_batch_norm  # noqa: F401  (importing registers its checks)
import checks_bucket_sizing  # noqa: F401
import checks_gloo_backend  # noqa: F401
import checks_gradients  # noqa: F401
import checks_join  # noqa: F401
import checks_loop_features  # noqa: F401  (importing registers its checks)
import checks_methods  # noqa: F401
import checks_observe  # noqa: F401
import checks_onebit  # noqa: F401
import checks_onebit_memory  # noqa: F401
import checks_rows  # noqa: F401
import checks_state  # noqa: F401
import checks_summing  # noqa: F401
import checks_training
import horovod.torch as hvd
import torch
from support.checking import run_checks

from grace_ext.adapters._torch import wrapped_optimizer


def use(backend: str) -> None:
    make = wrapped_optimizer.make_transport
    wrapped_optimizer.make_transport = lambda process_set, given, prefix: make(process_set, given or backend, prefix)


def main() -> None:
    if sys.argv[2:]:
        use(sys.argv[2])
    # The numbers of ranks are not known before init, so both sizes that the tests use are described by a rule.
    hvd.init(process_sets="dynamic")
    torch.set_num_threads(1)
    for odd in (0, 1):
        checks_training.PROCESS_SETS.append(hvd.add_process_set(list(range(odd, hvd.size(), 2))))
    run_checks(
        sys.argv[1],
        hvd.rank(),
        hvd.size(),
        lambda name, number: hvd.allreduce(torch.tensor([number]), op=hvd.Sum, name=name).item(),
    )
    hvd.shutdown()


main()
