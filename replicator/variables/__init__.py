"""Variables with a component per replica, or with one owner."""
