"""meshrl: one controller program drives meshes of generator, reward and learner processes."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshrl.errors import UserError
    from meshrl.metrics import StepReport
    from meshrl.run import Run, launch
    from meshrl.session import Session, SessionConfig

__all__ = ["Run", "Session", "SessionConfig", "StepReport", "UserError", "launch"]

# Looked up on first use, so that `import meshrl` stays cheap and starts nothing.
_HOMES = {
    "Run": "meshrl.run",
    "Session": "meshrl.session",
    "SessionConfig": "meshrl.session",
    "StepReport": "meshrl.metrics",
    "UserError": "meshrl.errors",
    "launch": "meshrl.run",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'meshrl' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
