"""When is KV needed again? Distributions of waits, learned online, and what room kept for their end is worth."""

from kvpilot.forecast.curve import Forecast
from kvpilot.forecast.forecaster import Forecaster

__all__ = ["Forecast", "Forecaster"]
