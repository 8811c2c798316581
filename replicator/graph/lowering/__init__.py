"""Replaces what was matched by ops that communicate."""
