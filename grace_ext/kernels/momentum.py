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


@kernel(
    "void(Array(float32, 1, 'C', readonly=True), Array(float32, 1, 'C', readonly=True), float32, float32[::1], float32[::1])"
)
def hold_back(held, gradient, share, following, out):
    """following = share * (held + gradient); out = held + gradient - following. All float32[d]; out may be gradient.

    With the same share in all steps, out is the gradients' moving average with that factor, and whatever the shares, what comes
    out in all steps and what is still held sum to the gradients.
    """
    for i in range(held.size):
        total = held[i] + gradient[i]
        kept = share * total
        following[i] = kept
        out[i] = total - kept
