"""Makes `unlabelled` importable, which the tests of objectives share."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
