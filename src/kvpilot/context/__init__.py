"""From messages to segments with token spans, and from tokens to the chunks of a cache layer."""
