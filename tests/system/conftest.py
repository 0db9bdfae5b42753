from __future__ import annotations

import sys
from pathlib import Path

# The browser that takes the README's pictures.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "dashboards"))
