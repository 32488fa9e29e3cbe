"""Faults for fleets of real processes."""
