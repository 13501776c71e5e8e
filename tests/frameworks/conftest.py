"""Each file here needs the package of its name, in versions that go with no other's: `make test-frameworks`.

Where that package is not installed its file is not collected.
"""

from importlib.util import find_spec
from pathlib import Path

collect_ignore = [
    path.name for path in Path(__file__).parent.glob("test_*.py") if find_spec(path.stem.removeprefix("test_")) is None
]
