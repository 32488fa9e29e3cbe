"""The shipped trainer: models, data, loop, evaluation, export."""
