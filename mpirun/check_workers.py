"""Run by the workers that the set-up starts: a framework's Horovod and mpi4py must work and agree."""

import sys

try:
    from mpi4py import MPI  # before Horovod, which then uses the MPI that mpi4py has initialised
except ImportError:
    MPI = None

if sys.argv[1] == "torch":
    import horovod.torch as hvd
    import torch

    def gather_rank(times):
        return hvd.allgather(torch.full((times,), hvd.rank(), dtype=torch.uint8), name="check").tolist()

else:
    import horovod.tensorflow as hvd
    import tensorflow as tf

    def gather_rank(times):
        return hvd.allgather(tf.fill([times], tf.cast(hvd.rank(), tf.uint8)), name="check").numpy().tolist()


hvd.init()
here = (hvd.rank(), hvd.size())
if hvd.size() < 2:
    sys.exit("this worker is alone: mpirun and Horovod belong to two different MPIs")
if gather_rank(hvd.rank() + 1) != [rank for rank in range(hvd.size()) for _ in range(rank + 1)]:
    sys.exit("allgather gave something else than every worker's part in the order of ranks")
if MPI and hvd.mpi_enabled() and (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size) != here:
    sys.exit("mpi4py and Horovod belong to two different MPIs")
