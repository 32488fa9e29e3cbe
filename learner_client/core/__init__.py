"""The learner's decisions, pure: no clock, no randomness, no threads, no tensors, no network."""
