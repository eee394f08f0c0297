"""Adapters to training frameworks, installed as grace_ext.adapters. Import the one you need; each needs its framework."""
