"""How well kvpilot understands recorded agents."""
