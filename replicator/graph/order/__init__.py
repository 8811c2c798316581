"""Effects, and in which order they happen."""
