"""From a spec to a compressor, and from a gradient to a container and back."""
