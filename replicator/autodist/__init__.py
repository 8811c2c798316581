"""The single-device door: a program that knows nothing of replicas, on many devices."""
