"""The builders of strategies, one file each."""
