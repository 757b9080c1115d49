"""Recorded agents against simulated caches: how good a policy is, and how good one could be."""
