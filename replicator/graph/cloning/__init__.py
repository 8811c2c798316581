"""Replicas that are copies of another."""
