"""Clocks, power and temperature of a GPU while it works, as nvidia-smi reads them."""

import contextlib
import subprocess
import threading
import time
from collections.abc import Sequence
from statistics import median

import torch

# by name in a row of results: nvidia-smi's name
FIELDS = {"sm_mhz": "clocks.sm", "memory_mhz": "clocks.mem", "watts": "power.draw", "celsius": "temperature.gpu"}
INTERVAL_MS = 100


def query(device: torch.device, *names: str) -> list[str]:
    """nvidia-smi's words for these fields of a GPU, found by its UUID."""
    identity = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    choice = [f"--id=GPU-{identity}"] if identity is not None else []
    return ["nvidia-smi", *choice, f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits"]


class Gauge(contextlib.AbstractContextManager["Gauge"]):
    """Samples of FIELDS within a ``with`` block, each with the host's time; none on a CPU or without nvidia-smi."""

    def __init__(self, device: torch.device) -> None:
        self.samples: list[tuple[float, list[float]]] = []
        self.process: subprocess.Popen[str] | None = None
        if device.type == "cuda" and torch.version.hip is None:
            self.words = [*query(device, *FIELDS.values()), f"--loop-ms={INTERVAL_MS}"]
        else:
            self.words = []

    def __enter__(self) -> "Gauge":
        with contextlib.suppress(OSError):
            if self.words:
                self.process = subprocess.Popen(
                    self.words, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
                )
                threading.Thread(target=self._read, args=(self.process,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with contextlib.suppress(ValueError):  # a message, or a field that this GPU does not have
                self.samples.append((time.monotonic(), [float(word) for word in line.split(",")]))

    def medians(self, spans: Sequence[tuple[float, float]]) -> dict[str, float]:
        """The median of each field over the samples that lie within these spans of the host's time."""
        values = [value for moment, value in self.samples if any(begin <= moment <= end for begin, end in spans)]
        return {name: median(column) for name, column in zip(FIELDS, zip(*values, strict=True), strict=False)}
