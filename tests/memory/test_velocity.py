"""The velocity that memories with a momentum keep. What it computes, with clipping and Nesterov's, is tested by test_dgc.py."""

import numpy as np

from grace_ext.memory.velocity import Velocity
from grace_ext.rng import Stream


def test_a_share_makes_a_moving_average():
    memory = Velocity(0.9, 0.1)
    for expected in (0.2, 0.38):
        gradient = np.full(3, 2, np.float32)
        found, _ = memory.correct_gradient("w", [gradient], np.empty(3, np.float32), 4, Stream(), 0.0)
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        memory.commit()
        assert (gradient == 2).all()
    np.testing.assert_allclose(memory.state_dict()["w"]["velocity"], 0.38, rtol=1e-6)
