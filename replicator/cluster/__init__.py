"""Several hosts: which there are, and the connection to them."""
