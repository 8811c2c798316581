"""Sphinx extensions of the documentation site, one file per purpose."""
