"""What communication costs, and what is chosen for it."""
