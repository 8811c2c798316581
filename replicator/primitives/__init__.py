"""The primitives: one file each, with its meaning, its dual and its lowering."""
