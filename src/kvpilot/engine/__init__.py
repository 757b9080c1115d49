"""What runs inside vLLM's processes: which session a block belongs to, and what is done about it.

``commands``, ``book`` and ``kept`` are pure and import neither vLLM nor torch; the rest is loaded by vLLM itself
(``plugin``) and works with exactly the versions that it names.
"""
