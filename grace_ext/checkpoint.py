"""The import path that grace_ext.exchange.checkpoint had at first. It stays."""

from .exchange.checkpoint import KEY, POLICIES, REDISTRIBUTE, RESET, VERSION, Loaded, choose, pack, redistribute, settle

__all__ = ["KEY", "POLICIES", "REDISTRIBUTE", "RESET", "VERSION", "Loaded", "choose", "pack", "redistribute", "settle"]
