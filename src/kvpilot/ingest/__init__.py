"""Observations flowing in: what the cache layer's directory and the engines' KV events say is where."""
