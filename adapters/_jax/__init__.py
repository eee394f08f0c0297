"""The parts of the JAX adapter."""
