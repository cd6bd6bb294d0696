"""pytest on an extension that lies in a build folder: scripts/pytest_with.py BUILD [pytest arguments].

It is loaded before the package looks for the installed one.
"""

import importlib.util
import sys
from pathlib import Path

import pytest

(path,) = Path(sys.argv[1]).glob("_cpu*.so")
spec = importlib.util.spec_from_file_location("ringweave._cpu", path)
assert spec is not None and spec.loader is not None  # noqa: PT018
sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules[spec.name])
sys.exit(pytest.main(sys.argv[2:]))
