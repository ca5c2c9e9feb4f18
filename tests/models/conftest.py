"""Makes `test_encoders` importable, whose encoders other tests take."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
