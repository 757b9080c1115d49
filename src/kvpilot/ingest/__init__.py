"""Observations flowing in: what the cache layer's directory and the engine's KV events say is really where."""
