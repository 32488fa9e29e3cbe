"""A whole fleet in virtual time: the real cores under seeded faults (design section 7)."""
