"""Benchmarks behind `kvpilot bench …`."""
