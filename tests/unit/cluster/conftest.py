from __future__ import annotations

import sys
from pathlib import Path

# Test modules share the modules beside this one.
sys.path.insert(0, str(Path(__file__).resolve().parent))
