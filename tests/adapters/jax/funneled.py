"""One process in which MPI was initialized for one thread only."""

import mpi4py

mpi4py.rc.thread_level = "funneled"

from mpi4py import MPI  # noqa: E402

from grace_ext import ConfigError  # noqa: E402
from grace_ext.adapters._common.mpi_transport import MpiTransport  # noqa: E402

try:
    MpiTransport(MPI.COMM_WORLD)
except ConfigError as error:
    print("refused:", error)
