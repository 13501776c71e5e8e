"""Each file here needs the package of its name; where that is not installed the file is not collected. test_steps.py is
for all that are installed. `make test-frameworks` makes environments that have them."""

from importlib.util import find_spec
from pathlib import Path

import ranks

collect_ignore = [
    path.name
    for path in Path(__file__).parent.glob("test_*.py")
    if path.stem != "test_steps" and find_spec(path.stem.removeprefix("test_")) is None
]
ranks.IMPORTS += ["megatron.core.models.gpt", "torchtitan.models.llama3"]  # seconds of each rank; left out where absent
