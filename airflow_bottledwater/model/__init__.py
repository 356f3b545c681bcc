"""Frozen value objects, standard library only: what the other rooms talk about."""
