"""The import rule: each kind of breach is seen, and what is allowed is not."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("check_imports", ROOT / "tools" / "check_imports.py")
check_imports = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(check_imports)


def breaches(root, file, line):
    path = root / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"import os\n\n{line}\n")
    return list(check_imports.breaches(root))


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("services/router/service.py", "from services.pool_manager.plan import plan"),
        ("services/router/service.py", "from services import rank_worker"),
        ("services/router/service.py", "def f():\n    import services.pool_manager.books"),
        ("services/router/service.py", "from ..pool_manager import plan"),
        ("services/router/service.py", "from latentpool.cli import main"),
        ("kernels/numpy/backend.py", "from latentpool.errors import LatentPoolError"),
        ("kernels/numpy/backend.py", "import services.router"),
        ("kernels/api.py", "import grpc.aio"),
        ("latentpool/client.py", "from kernels.api import Kernels"),
        ("latentpool/client.py", "from services.router import service"),
        ("latentpool/client.py", "from latentpool import cli"),
        ("latentpool/client.py", "from . import cli"),
    ],
)
def test_breach(tmp_path, file, line):
    found = breaches(tmp_path, file, line)
    assert len(found) == 1
    assert found[0].startswith(f"{file}:")


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("services/router/service.py", "from services.router.text import Text\nfrom latentpool import net\nimport kernels.api"),
        ("services/router/service.py", "from . import text\nfrom .text import Text"),
        ("kernels/numpy/backend.py", "from kernels.api import Kernels\nimport numpy"),
        ("latentpool/client.py", "from latentpool.v1 import router_pb2\nimport grpc"),
        ("latentpool/cli/app.py", "from services.router.service import Router\nfrom services.pool_manager import plan"),
    ],
)
def test_allowed(tmp_path, file, line):
    assert breaches(tmp_path, file, line) == []
