"""Which values are the same on all replicas."""
