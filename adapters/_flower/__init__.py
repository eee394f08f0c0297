"""The parts of grace_ext.adapters.flower."""
