"""The graph of a step after each stage of its build: `Replicator.stages`."""
