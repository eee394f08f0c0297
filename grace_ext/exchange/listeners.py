"""Which listeners an exchange has."""

from ..observe.capture import Capture
from ..observe.dispatch import ObserverDispatcher
from ..observe.listener import StepListener
from ..observe.parse import Observe
from ..policy.auto_tuner import AutoTuner
from ..policy.schedules import Schedules
from ..transport.base import Transport
from .fusion import Fusion


def listeners_for(
    transport: Transport, schedules: Schedules, observe: Observe, capture: Capture | None
) -> list[StepListener]:
    """Make the listeners of an exchange.

    Args:
        transport: The transport of the exchange, before listeners wrap it.
        schedules: Options by step; adaptive ones have listeners.
        observe: See Exchange.
        capture: See Exchange.

    Returns:
        The listeners, in the order in which they hear of an event.
    """
    return [
        Fusion(transport),
        ObserverDispatcher(transport, observe, capture),
        AutoTuner(transport),
        *schedules.listeners(transport),
    ]
