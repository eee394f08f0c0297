"""Parts of the PyTorch adapters."""
