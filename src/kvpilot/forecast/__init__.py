"""When will a session be heard of again? Learned from pauses that ended; pure, time is an argument."""

from kvpilot.forecast.gaps import Forecast, GapForecaster

__all__ = ["Forecast", "GapForecaster"]
