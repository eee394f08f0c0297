"""Momentum: the velocity is updated, and the gradient is replaced by it."""

from ._compile import kernel


@kernel("void(Array(float32, 1, 'C', readonly=True), float32[::1], float32, float32, float32[::1])")
def accumulate_momentum(velocity, gradient, momentum, share, following):
    """following = gradient = momentum * velocity + share * gradient. All float32[d]; following may be velocity."""
    for i in range(velocity.size):
        value = momentum * velocity[i] + share * gradient[i]
        following[i] = value
        gradient[i] = value


@kernel("void(Array(float32, 1, 'C', readonly=True), float32[::1], float32, float32, float32[::1])")
def accumulate_nesterov(velocity, gradient, momentum, share, following):
    """following = momentum * (velocity + share * gradient); gradient = following + share * gradient."""
    for i in range(velocity.size):
        own = share * gradient[i]
        value = momentum * (velocity[i] + own)
        following[i] = value
        gradient[i] = value + own
