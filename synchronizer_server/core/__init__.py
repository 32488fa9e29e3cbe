"""The pure core of the synchronizer: events in, effects out."""
