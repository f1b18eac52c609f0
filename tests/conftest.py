"""Settings of all tests: no example is timed, none depends on what an earlier run found."""

from hypothesis import settings

settings.register_profile("meshrl", deadline=None, derandomize=True, database=None)
settings.load_profile("meshrl")
