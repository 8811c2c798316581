"""Does what each file of fast/ does by the public API, in more time."""
