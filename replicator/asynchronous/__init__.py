"""Asynchronous mode: programs that train the same variables, each at its own speed."""
