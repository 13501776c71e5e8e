"""The table of GPU architectures: abilities, and the tiles of our matmuls. No other file asks a device for its
architecture. Needs no Triton.

An unlisted NVIDIA GPU gets the row of the newest older architecture of its generation. Other devices, and GPUs before
sm_80, have no row: BLAS makes fp32 logits there.
"""

import functools
import os
from typing import Any, NamedTuple

import torch

from .memory import Cache
from .tiles import INTERPRETED, Tile, cdiv

RELATIVE_STRIP = 32 if INTERPRETED else 128  # columns that share one offset of relative logits


class Gpu(NamedTuple):
    """A row of the table: a GPU architecture. Only tiles of Hopper have been measured."""

    name: str  # of the architecture, such as "sm_90"
    shared_bytes: int  # bytes of shared memory of a program, a bound that tests check
    multiprocessors: int  # number that a plan assumes where no such GPU is present
    logits: Tile  # tile of the logits' matmul
    # the step over rows is at most the number of rows of any other tile, so that no unwritten row is read
    product: Tile  # tile of the gradients' products
    few_rows: Tile | None = None  # tile of the logits' matmul for few rows, where reading the weight takes the time
    own_dhidden: bool = False  # our product for dhidden is faster than BLAS's
    # minimum and maximum number of rows with which our product for dweight is as fast as BLAS's; (0, -1): none
    own_dweight_rows: tuple[int, int] = (0, -1)
    warp_size: int = 32  # number of threads of a warp
    fp32_products: str = "tf32x3"  # Triton's ``input_precision`` for small products of fp32 operands
    fp8: bool = False  # tensor cores multiply e4m3 (OCP's) operands
    e4m3_gradients: bool = False  # measured: the gradients' products of e4m3 operands are faster

    def __str__(self) -> str:
        return self.name

    def __hash__(self) -> int:
        return hash(self.name)  # a plan's sizes are looked up at each call

    def logits_tile(self, rows: int) -> Tile:
        """The tile of the logits' matmul for a chunk of ``rows`` rows. The strips (``strips_of``) are the same for all
        numbers of rows."""
        return self.few_rows if self.few_rows is not None and rows <= self.few_rows.block_m else self.logits

    def strip_width(self, relative: bool) -> int:
        """The number of columns of a strip: RELATIVE_STRIP for ``relative`` logits, a tile's width for exponentials."""
        return RELATIVE_STRIP if relative else self.logits.block_n

    def strips_of(self, vocab: int, relative: bool) -> int:
        """The number of strips in a row of ``vocab`` logits, including strips of the last tile beyond the
        last column."""
        return cdiv(vocab, self.logits.block_n) * (self.logits.block_n // self.strip_width(relative))


def hopper(name: str, shared_bytes: int, multiprocessors: int) -> Gpu:
    """A row for Hopper: the tensor copy engine loads operands; accumulators are in registers."""
    few_rows = Tile(block_m=64, warps=4, stages=4)
    logits, product = Tile(e4m3_stages=4), Tile()
    own_products: dict[str, Any] = {"own_dhidden": True, "own_dweight_rows": (512, 1024)}
    return Gpu(
        name, shared_bytes, multiprocessors, logits, product, few_rows, **own_products, fp8=True, e4m3_gradients=True
    )


def blackwell(name: str, shared_bytes: int, multiprocessors: int) -> Gpu:
    """A row for Blackwell: the tensor copy engine loads operands; accumulators are in tensor memory. Tiles have 128
    columns, since 256 would not fit in registers. sm_120 lacks both, and has a row of ``ampere``."""
    logits = Tile(block_n=128, warps=4, per_multiprocessor=2)
    return Gpu(name, shared_bytes, multiprocessors, logits, product=Tile(), fp8=True)


def ampere(name: str, shared_bytes: int, multiprocessors: int, fp8: bool = False) -> Gpu:
    """A row for Ampere and others without the tensor copy engine: loads through pointers. Two of the three stages take
    96 KB of shared memory."""
    tile = Tile(described=False)
    return Gpu(name, shared_bytes, multiprocessors, tile, product=tile, fp8=fp8)


def cdna(name: str, shared_bytes: int, multiprocessors: int) -> Gpu:
    tile = Tile(block_n=128, block_k=32, stages=2, described=False)
    return Gpu(name, shared_bytes, multiprocessors, tile, product=tile, warp_size=64, fp32_products="ieee")


GPUS = {
    gpu.name: gpu
    for gpu in (
        ampere("sm_80", 166_912, 108),
        ampere("sm_86", 101_376, 84),
        ampere("sm_89", 101_376, 128, fp8=True),
        hopper("sm_90", 232_448, 132),
        blackwell("sm_100", 232_448, 148),
        blackwell("sm_103", 232_448, 160),
        ampere("sm_120", 101_376, 170, fp8=True),
        cdna("gfx942", 65_536, 304),
        cdna("gfx950", 163_840, 256),
    )
}

CARDS = {  # names of cards by architecture
    "sm_80": ("A100", "A30"),
    "sm_86": ("RTX 3090", "A40", "A10"),
    "sm_89": ("RTX 4090", "L40S", "L4"),
    "sm_90": ("H100", "H200", "H800", "GH200"),
    "sm_100": ("B200", "GB200"),
    "sm_103": ("B300", "GB300"),
    "sm_120": ("RTX 5090", "RTX PRO 6000"),
    "gfx942": ("MI300X", "MI325X"),
    "gfx950": ("MI350X", "MI355X"),
}


def gpu_named(text: str) -> Gpu | None:
    """The row for the name of an architecture, such as "sm_90", or of a card, such as "H100" or "rtx4090"; None for any
    other name."""
    name = text.lower().replace(" ", "").replace("-", "")
    architectures = {card.lower().replace(" ", ""): gpu_name for gpu_name, cards in CARDS.items() for card in cards}
    return GPUS.get(name) or GPUS.get(architectures.get(name, ""))


def run_as(name: str) -> Gpu:
    """The row for the name of an architecture. Under Triton's interpreter the row gets small tiles and 4
    multiprocessors, so that tests run the persistent loop."""
    gpu = GPUS[name]
    if not INTERPRETED:
        return gpu

    def shrink(tile: Tile, m: int = 32, k: int = 64) -> Tile:
        return tile._replace(block_m=m, block_n=64, block_k=k, per_multiprocessor=1)

    return gpu._replace(
        name="interpreter" if gpu.name == "sm_90" else gpu.name, multiprocessors=4,
        logits=shrink(gpu.logits), product=shrink(gpu.product, k=32),
        few_rows=gpu.few_rows and shrink(gpu.few_rows, m=16),
        own_dweight_rows=(16, 64) if gpu.own_dweight_rows[1] > 0 else gpu.own_dweight_rows,
    )  # fmt: skip


# name of the architecture that replaces the present GPU's, for tests; None: nothing is replaced
ARCHITECTURE_OVERRIDE = os.environ.get("CHUNKED_HEAD_ARCH")
if ARCHITECTURE_OVERRIDE is not None and ARCHITECTURE_OVERRIDE not in GPUS:
    raise ValueError(f"CHUNKED_HEAD_ARCH must be one of {', '.join(GPUS)}, got {ARCHITECTURE_OVERRIDE!r}")


@functools.cache
def gpu_of(device: torch.device) -> Gpu | None:
    """The ``Gpu`` of a device's architecture; None if the Triton matmuls do not run on the device."""
    if ARCHITECTURE_OVERRIDE is not None:
        return run_as(ARCHITECTURE_OVERRIDE)
    if INTERPRETED or (device.type == "cuda" and not torch.cuda.is_available()):
        return run_as("sm_90")  # interpreted, or a plan for a GPU on a machine without one
    if device.type != "cuda":
        return None
    if torch.version.hip is not None:
        return GPUS.get(torch.cuda.get_device_properties(device).gcnArchName.split(":")[0])
    return newest(*torch.cuda.get_device_capability(device))


def newest(major: int, minor: int) -> Gpu | None:
    """The row of the newest listed architecture of the generation ``major`` up to ``major.minor``; None if the table
    has no such row."""
    names_newest_first = [f"sm_{major}{i}" for i in range(minor, -1, -1)]
    return next((GPUS[name] for name in names_newest_first if name in GPUS), None)


@functools.cache
def multiprocessors_of(device: torch.device) -> int:
    """The number of multiprocessors of a device. If this machine has no GPU: the number in the row of GPUS that
    ``gpu_of(device)`` returns, or 0 if it returns None."""
    if device.type == "cuda" and torch.cuda.is_available():
        return torch.cuda.get_device_properties(device).multi_processor_count
    gpu = gpu_of(device)
    return 0 if gpu is None else gpu.multiprocessors


def programs_of(tile: Tile, rows: int, columns: int, device: torch.device) -> int:
    """The number of programs of a persistent matmul with a result [rows, columns]: the number that the GPU runs at a
    time, or the number of the result's tiles if that is smaller."""
    num_tiles = cdiv(rows, tile.block_m) * cdiv(columns, tile.block_n)
    return min(tile.per_multiprocessor * multiprocessors_of(device), num_tiles)


# How dhidden's product cuts the tiles of its last, incomplete turn into parts over the vocabulary: number of parts of
# each tile; number of parts of all cut tiles, whose partial sums need memory
DhiddenSplit = tuple[int, int]
UNCUT: DhiddenSplit = 1, 0
MAX_PIECES = 16  # maximum number of parts of a tile
MIN_STEPS = 4  # minimum number of steps over the vocabulary in a part
SPLITS: Cache[tuple, DhiddenSplit] = Cache(4096)  # results of ``dhidden_split`` by its arguments


def dhidden_split(
    tile: Tile, rows: int, hidden: int, vocab: int, multiprocessors: int, most_units: int | None = None
) -> DhiddenSplit:
    """The split with which dhidden's product takes the least time. ``most_units``: the number of parts for which there
    is memory; None: four for each multiprocessor.

    144 tiles on 132 multiprocessors would take two turns, the second for 12 tiles only. Cut into 11 parts each, these
    12 tiles take an eleventh of a turn. Writing and reading a part's sums takes about 0.2 % of a turn. Since the sums
    also take memory, each part counts as 0.5 % of a turn.
    """
    most_units = 4 * multiprocessors if most_units is None else most_units
    key = tile, rows, hidden, vocab, multiprocessors, most_units
    return SPLITS.get_or_make(key, lambda: fewest_turns(*key))


def fewest_turns(tile: Tile, rows: int, hidden: int, vocab: int, multiprocessors: int, most_units: int) -> DhiddenSplit:
    """Computes ``dhidden_split``."""
    num_last_tiles = cdiv(rows, tile.block_m) * cdiv(hidden, tile.block_n) % multiprocessors
    best_split, min_turns = UNCUT, float("inf")
    for num_parts in range(1, MAX_PIECES + 1):
        if num_parts > 1 and (num_last_tiles * num_parts > most_units or num_parts * MIN_STEPS * tile.block_k > vocab):
            break
        turns = cdiv(num_last_tiles * num_parts, multiprocessors) / num_parts + 0.005 * num_parts
        if turns < min_turns:
            best_split, min_turns = (num_parts, num_last_tiles * num_parts if num_parts > 1 else 0), turns
    return best_split
