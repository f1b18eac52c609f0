"""A worker whose module cannot be imported, unless by the test itself."""

import os

from meshrl.worker import Worker, endpoint

if "MESHRL_TEST_IMPORT" not in os.environ:
    raise ImportError("no library of that name")


class Doomed(Worker):
    @endpoint
    async def answer(self) -> None:
        pass
