"""Finds the communication of all replicas and pairs it."""
