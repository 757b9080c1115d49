"""From what is worth what to moves. Pure: time is an argument, nothing here talks to anybody.

``placement`` over ``holdings`` is what the coordinator and the simulator are driven by, and what is measured at a
hundred thousand sessions.
"""
