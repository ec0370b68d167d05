"""`latentpool pool-manager` whose plan gives as many pages as SOAK_PAGES says, whatever room there is."""

import dataclasses
import os
from typing import Any

import services.pool_manager.service as pool_manager
from latentpool.cli import main

_choose = pool_manager.choose


def _capped(*arguments: Any, **named: Any) -> Any:
    made = _choose(*arguments, **named)
    pages = int(os.environ["SOAK_PAGES"]) // made.residues * made.residues
    return dataclasses.replace(made, pages=pages, stream_pages=pages)


if __name__ == "__main__":
    pool_manager.choose = _capped
    main()
