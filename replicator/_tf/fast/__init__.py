"""What only makes the library faster."""
