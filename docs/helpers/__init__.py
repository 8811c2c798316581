"""What code cells of pages draw and check with."""
