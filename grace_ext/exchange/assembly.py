"""Which listeners an exchange has."""

from ..observe.capture import Capture
from ..observe.dispatch import ObserverDispatcher
from ..observe.listener import StepListener
from ..policy.auto_tuner import AutoTuner
from ..policy.schedules import Schedules
from ..transport.base import Transport
from .fusion import Fusion


def listeners_for(transport: Transport, schedules: Schedules, observe, capture: Capture | None) -> list[StepListener]:
    """In the order in which they hear of an event. observe, capture: see Exchange."""
    return [
        Fusion(transport),
        ObserverDispatcher(transport, observe, capture),
        AutoTuner(transport),
        *schedules.listeners(transport),
    ]
