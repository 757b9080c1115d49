"""Replaying recorded agents through a gateway: a pure plan, and a driver that carries it out."""
