"""What can go wrong between a learner's parameters and a generator's; the latter stay whole each time."""


class WeightsError(RuntimeError):
    """Weights did not arrive. The receiver goes on with the version it had."""


class LayoutError(WeightsError):
    """Two layouts do not fit, or one contradicts itself: a gap, an overlap, a shape that differs."""


class ArenaUnreachable(WeightsError):
    """The memory of a learner rank cannot be opened: it is dead, on another host, or another user's."""


class VersionUnavailable(WeightsError):
    """The arena does not hold the version that was asked for: never published, half written, or replaced."""


class DigestMismatch(WeightsError):
    """What arrived is not what was published."""


class ArenaBusy(WeightsError):
    """A half of an arena stayed in use past the deadline; the message names the processes that use it."""
