"""The graph of a step after each stage of its build, to look at: `Replicator.stages`."""
