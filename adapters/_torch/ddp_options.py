"""The options of what compresses for DistributedDataParallel, directly or below a framework."""

from grace_ext.policy import Memories

from .._common.options import CompressionOptions


class DdpOptions(CompressionOptions):
    """CompressionOptions without those of Horovod's buckets: DDP has its own."""

    absent = ("bucket_bytes", "groups")

    def check_parts(self) -> None:
        """Raises ConfigError for specs that name no part there is. What the optimizer decides is checked later."""
        self.make_rules()
        self.make_communicator()
        Memories(self._memory)
