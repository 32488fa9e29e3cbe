"""The synchronizer: merges outer gradients of learners, one fragment at a time."""
