"""Replication of round records to standbys (design sections 5 and 6)."""
