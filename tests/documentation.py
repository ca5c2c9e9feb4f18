"""docs/make_reference.py as a module: it finds the commands and writes the generated pages."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def _load(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make_reference = _load(ROOT / "docs" / "make_reference.py")
EXAMPLES = make_reference.found_commands()  # {"package.module:function": the examples of its --help}
