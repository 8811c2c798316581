"""The program `python -m replicator.serve`: the server of one host."""
