"""Elastic Horovod: hvd.elastic.TorchState(model=..., optimizer=..., local=...) with rounds of local steps.

grace_ext.adapters.local_steps registers the handler below with Horovod.
"""

from horovod.torch.elastic import state as horovods

from .elastic import put_first
from .round_member import RoundMember


class RoundMemberStateHandler(horovods.StateHandler):
    """A commit keeps what the ranks share, and this rank's memory. `sync` connects the ranks, which go on from what rank 0 shares."""

    def __init__(self, member: RoundMember):
        super().__init__(member)
        self._restored: dict | None = None
        self._saved = member.commit()

    def save(self) -> None:
        self._saved = self.value.commit()

    def restore(self) -> None:
        self._restored = self._saved

    def sync(self) -> None:
        restored, self._restored = self._restored, None
        self.value.reconnect(restored)
        self.value.begin_optimizers()


def register() -> None:
    """Let Horovod know the handler, once."""
    put_first(RoundMember, RoundMemberStateHandler)
