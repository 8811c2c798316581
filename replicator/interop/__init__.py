"""What other libraries find in a step."""
