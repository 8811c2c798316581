"""Passes that need nothing but a graph."""
