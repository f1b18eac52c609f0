"""What can go wrong between a learner's parameters and a generator's; the latter stay whole each time."""


class WeightsError(RuntimeError):
    """Weights did not arrive. The receiver goes on with the version it had."""


class LayoutError(WeightsError):
    """Two layouts do not fit, or one contradicts itself: a gap, an overlap, a shape that differs."""


class ArenaUnreachable(WeightsError):
    """A learner rank cannot be reached, or its memory not be opened: it is dead, on another host, or another
    user's."""


class TransportUnavailable(WeightsError):
    """A way of transport does not exist here."""


class TransferFailed(WeightsError):
    """Bytes did not come across, or not in time; the message names the peer."""


class VersionUnavailable(WeightsError):
    """The arena does not hold the version that was asked for: never published, half written, or replaced."""


class DigestMismatch(WeightsError):
    """What arrived is not what was published."""


class ArenaBusy(WeightsError):
    """A slot of an arena stayed in use past the deadline; the message names the processes that read it."""
