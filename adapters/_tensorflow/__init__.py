"""Parts of the TensorFlow adapter."""
