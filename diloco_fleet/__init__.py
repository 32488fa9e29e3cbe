"""The whole fleet: run it, watch it, report on it."""
