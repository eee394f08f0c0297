"""none: nothing is remembered."""

from support.arrays import gauss, same_bits

import grace_ext


def test_no_memory():
    memory = grace_ext.memory("none")
    gradient = gauss(10)
    assert memory.compensate("w", gradient) is gradient
    memory.update("w", gradient, gradient * 0)
    assert same_bits(memory.compensate("w", gradient), gradient)
    assert memory.begin("w", 10) is None
    memory.commit()
    memory.rollback()
    memory.load_state_dict({})
    assert memory.state_dict() == {} and not memory.stateful
