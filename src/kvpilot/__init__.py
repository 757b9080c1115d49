"""kvpilot: agent-aware KV cache control between LLM agents and the engines that serve them."""

__version__ = "0.1.0"
