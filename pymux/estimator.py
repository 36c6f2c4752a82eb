"""What to expect of phases and switches, learnt from those that were. Pure."""

from __future__ import annotations

from dataclasses import dataclass

_LEVEL = 0.3  # weight of the latest phase in the mean
_TREND = 0.1  # and in the trend
_MAX_PHASES = 64  # of a job whose durations are remembered
_COST = 0.3  # of the latest switch in the seconds a page takes


@dataclass(slots=True)
class _Series:
    level: float
    trend: float = 0.0


class Durations:
    """Seconds that phases take: an exponentially weighted mean with trend, for each job and phase.

    Holt's linear method (C. C. Holt 1957, reprinted in Int. J. Forecasting 20, 2004): rollouts grow longer as
    a model learns to think, and a mean alone lags behind.
    """

    def __init__(self) -> None:
        self._series: dict[tuple[str, str], _Series] = {}

    def learn(self, job: str, phase: str, count: int, seconds: float) -> None:
        """Note phases that have ended.

        Args:
            job: name of the run.
            phase: name of the phase.
            count: how many have ended.
            seconds: that they took in all.
        """
        if count <= 0:
            return
        latest = seconds / count
        series = self._series.get((job, phase))
        if series is None:
            if sum(j == job for j, _ in self._series) < _MAX_PHASES:
                self._series[job, phase] = _Series(latest)
            return
        before = series.level
        series.level = _LEVEL * latest + (1 - _LEVEL) * (before + series.trend)
        series.trend = _TREND * (series.level - before) + (1 - _TREND) * series.trend

    def expect(self, job: str, phase: str) -> float | None:
        """Seconds that the next phase of this name takes, or None where none has ended yet."""
        series = self._series.get((job, phase))
        return None if series is None else max(0.0, series.level + series.trend)

    @property
    def typical(self) -> float:
        """Seconds that a phase takes of which nothing is known: the mean of all that are; 0 without any."""
        return sum(s.level for s in self._series.values()) / len(self._series) if self._series else 0.0

    def forget(self, job: str) -> None:
        """Drop what is known of a job."""
        self._series = {key: s for key, s in self._series.items() if key[0] != job}


@dataclass(slots=True)
class SwitchCost:
    """Seconds that it takes a device to make a page resident for who is next."""

    per_page: float = 0.0

    def learn(self, pages: int, seconds: float) -> None:
        """Note a switch that moved so many pages."""
        if pages <= 0 or seconds < 0:
            return
        latest = seconds / pages
        self.per_page = latest if self.per_page == 0 else _COST * latest + (1 - _COST) * self.per_page
