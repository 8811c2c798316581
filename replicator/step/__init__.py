"""A step: built by a list of passes, kept, and called."""
