"""From a snapshot to decisions. Pure: time is an argument, nothing here talks to anybody.

``placement`` over ``holdings`` is what the simulator is driven by and what is measured at a hundred thousand sessions;
``rules`` is what the coordinator plans with until it is wired to them.
"""

from kvpilot.plan.rules import Decision, PlanSettings, Snapshot, ThreadView, plan

__all__ = ["Decision", "PlanSettings", "Snapshot", "ThreadView", "plan"]
