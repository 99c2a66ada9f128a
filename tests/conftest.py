"""What every test file may use. Helper modules beside the tests (e.g. `tiny_bundle`) import by their bare name."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode adds nothing to the path
