"""Plans of ninety requests, drawn at random, as they were when a change to the planner last meant to change them.

``PYTHONPATH=. python tests/plan/test_known_plans.py`` writes ``known_plans.json`` anew, one request a line: what
differs in it is what the change does to plans.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

KNOWN = Path(__file__).with_name("known_plans.json")
FIELDS = (
    "schedule", "chunk_tokens", "block_tokens", "tile_columns", "hidden_accumulate", "weight_accumulate",
    "extra_bytes", "peak_bytes", "budget",
)  # fmt: skip


def found_plans(requests: list[dict[str, Any]]) -> list[list[Any]]:
    import torch

    from chunked_head import losses, metrics, plan

    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    made_losses = {
        "none": None,
        "ce+z": losses.cross_entropy() + 1e-4 * losses.z_loss(),
        "smooth": losses.cross_entropy(label_smoothing=0.1),
        "focal": losses.focal(gamma=2.0),
        "grpo": losses.grpo() + 0.01 * losses.entropy(),
        "gspo": losses.gspo(),
        "dpo": losses.dpo(),
        "fkl": losses.forward_kl(),
        "rkl": losses.reverse_kl(),
        "jsd": losses.jsd(),
        "topk": losses.topk_kl(),
        "temp": losses.cross_entropy() + losses.entropy(temperature=2.0),
    }
    measured = {"": [], "acc": [metrics.accuracy()], "ent+acc": [metrics.entropy(), metrics.accuracy()]}

    def found(request: dict[str, Any]) -> list[Any]:
        given = {key: dtypes[value] if key.endswith("dtype") else value for key, value in request.items()}
        given |= {"loss": made_losses[request["loss"]], "metrics": measured[request["metrics"]]}
        try:
            made = plan(**given)
        except ValueError as error:
            return [str(error)]
        values = [getattr(made, field) for field in FIELDS]
        return [value if isinstance(value, int | str) else str(value).removeprefix("torch.") for value in values]

    return [found(request) for request in requests]


def test_plans_are_the_known_ones() -> None:
    """Made by a process of its own: where kernels are interpreted, their tiles are others."""
    run = [sys.executable, __file__, "--print"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)  # where this process looks
    found = json.loads(subprocess.run(run, env=environment, check=True, capture_output=True, text=True).stdout)
    for (request, expected), plan in zip(json.loads(KNOWN.read_text()), found, strict=True):
        assert plan == expected, request


if __name__ == "__main__":
    requests = [request for request, _ in json.loads(KNOWN.read_text())]
    plans = found_plans(requests)
    if "--print" in sys.argv:
        print(json.dumps(plans))
    else:
        lines = (json.dumps(pair) for pair in zip(requests, plans, strict=True))
        KNOWN.write_text("[\n" + ",\n".join(lines) + "\n]\n")
