"""Momentum: the velocity is updated by a gradient."""

from ._compile import kernel


@kernel("void(Array(float32, 1, 'C', readonly=True), Array(float32, 1, 'C', readonly=True), float32, float32, float32[::1])")
def accumulate_momentum(velocity, gradient, momentum, share, following):
    """following = momentum * velocity + share * gradient. All float32[d]; following may be velocity."""
    for i in range(velocity.size):
        following[i] = momentum * velocity[i] + share * gradient[i]


@kernel(
    "void(Array(float32, 1, 'C', readonly=True), Array(float32, 1, 'C', readonly=True), float32, float32, float32[::1],"
    " float32[::1])"
)
def accumulate_nesterov(velocity, gradient, momentum, share, following, out):
    """following = momentum * (velocity + share * gradient); out = following + share * gradient. out may be gradient."""
    for i in range(velocity.size):
        own = share * gradient[i]
        value = momentum * (velocity[i] + own)
        following[i] = value
        out[i] = value + own
