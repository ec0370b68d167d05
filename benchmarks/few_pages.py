"""`latentpool pool-manager` whose plan gives as many pages as SOAK_PAGES says, whatever room there is."""

import dataclasses
import os
from typing import Any

import services.pool_manager.service as pool_manager
from latentpool.cli import main

_plan = pool_manager.plan


def _capped(**arguments: Any) -> Any:
    pages = int(os.environ["SOAK_PAGES"])
    return dataclasses.replace(_plan(**arguments), pages=pages, stream_pages=pages)


if __name__ == "__main__":
    pool_manager.plan = _capped
    main()
