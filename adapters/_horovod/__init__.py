"""What the adapters over Horovod share."""
