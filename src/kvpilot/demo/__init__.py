"""The demo: three coding agents, other tenants beside them, passive and with kvpilot."""
