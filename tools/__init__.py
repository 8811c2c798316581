"""What the Makefile runs: wheels, versions of Python and TensorFlow, GPUs, checks."""
