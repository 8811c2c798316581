"""The program `python -m replicator.launch`: starts the servers and the program.

Nothing here needs TensorFlow: what runs on it are other processes.
"""
