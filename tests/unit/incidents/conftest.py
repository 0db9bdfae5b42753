from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from bundle_making import make_bundle

from samestep.checkpoint.storage import Storage


@pytest.fixture(scope="session")
def whole_bundle(tmp_path_factory: pytest.TempPathFactory) -> Storage:
    """One that nobody may change."""
    return make_bundle(
        tmp_path_factory.mktemp("whole") / "run", incidents={"bundle": {"code": True}}
    )
