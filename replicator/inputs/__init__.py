"""What feeds the replicas."""
