"""From a snapshot to decisions. Pure: time is an argument, nothing here talks to anybody."""

from kvpilot.plan.rules import Decision, PlanSettings, Snapshot, ThreadView, plan

__all__ = ["Decision", "PlanSettings", "Snapshot", "ThreadView", "plan"]
