"""The former import path of grace_ext.exchange.checkpoint, which stays valid."""

from .exchange.checkpoint import KEY, POLICIES, REDISTRIBUTE, RESET, VERSION, Loaded, choose, pack, redistribute, settle

__all__ = ["KEY", "POLICIES", "REDISTRIBUTE", "RESET", "VERSION", "Loaded", "choose", "pack", "redistribute", "settle"]
