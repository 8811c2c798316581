"""What a step takes, and when more replicas pay: `python -m replicator.profile`."""
