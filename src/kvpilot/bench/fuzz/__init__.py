"""``kvpilot bench fuzz``: a million generated requests against the real gateway and coordinator, in one process."""
