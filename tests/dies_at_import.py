"""A worker whose module ends the process that imports it, unless that is the test's own."""

import os

from meshrl.worker import Worker, endpoint

if "MESHRL_TEST_IMPORT" not in os.environ:
    print("importing badly", flush=True)
    os._exit(5)


class Doomed(Worker):
    @endpoint
    async def answer(self) -> None:
        pass
