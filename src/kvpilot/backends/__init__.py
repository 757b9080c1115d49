"""One executor per cache layer: say what it can do, move KV between its tiers, ask what it holds."""
