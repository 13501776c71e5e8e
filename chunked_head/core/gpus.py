"""The table of GPU architectures: what each can do, and the tiles of our matmuls on it. No other file asks a device for
its architecture. Needs no Triton.

An unlisted NVIDIA GPU has the row of the newest older architecture of its generation, as machine code does. On other
devices, and before sm_80 (no bf16 matmuls), BLAS makes fp32 logits.
"""

import functools
import os
from typing import Any, NamedTuple

import torch

from .memory import Cache
from .tiles import INTERPRETED, Tile, cdiv

RELATIVE_STRIP = 32 if INTERPRETED else 128  # columns that share one offset of relative logits


class Gpu(NamedTuple):
    """The row of an architecture. Only Hopper's tiles have been measured on its GPU."""

    name: str
    shared: int  # bytes of shared memory per program, a bound that tests check
    multiprocessors: int  # number that a plan assumes where no such GPU is present
    logits: Tile
    # tile of the gradients' products; its step over rows is at most the rows of any other tile, so that it reads no row
    # that was not written
    product: Tile
    few: Tile | None = None  # tile of the logits of few rows, where reading the weight takes the time
    own_dhidden: bool = False  # our product for dhidden is faster than BLAS's
    own_stored: tuple[int, int] = (0, -1)  # least and most rows with which our product stores dweight as fast as BLAS's
    warp: int = 32
    fp32_products: str = "tf32x3"  # Triton's ``input_precision`` for small products of fp32 operands
    fp8: bool = False  # tensor cores multiply e4m3 (OCP's) operands
    e4m3_gradients: bool = False  # measured: the gradients' products of e4m3 operands are faster

    def __str__(self) -> str:
        return self.name

    def __hash__(self) -> int:
        return hash(self.name)  # a plan's sizes are looked up at each call

    def logits_tile(self, rows: int) -> Tile:
        """Tile of the logits' matmul for a chunk of ``rows``. All have the same strips (``strips_of``)."""
        return self.few if self.few is not None and rows <= self.few.block_m else self.logits

    def strip_width(self, relative: bool) -> int:
        """Columns of a strip: with ``relative`` logits RELATIVE_STRIP, else a tile's columns."""
        return RELATIVE_STRIP if relative else self.logits.block_n

    def strips_of(self, vocab: int, relative: bool) -> int:
        """Number of column strips in a row of ``vocab`` logits, where each tile has complete strips."""
        return cdiv(vocab, self.logits.block_n) * (self.logits.block_n // self.strip_width(relative))


def hopper(name: str, shared: int, multiprocessors: int) -> Gpu:
    """A row for Hopper: the tensor copy engine, accumulators in registers, 227 KB of shared memory."""
    few = Tile(block_m=64, warps=4, stages=4)
    logits, product = Tile(e4m3_stages=4), Tile()
    own: dict[str, Any] = {"own_dhidden": True, "own_stored": (512, 1024)}
    return Gpu(name, shared, multiprocessors, logits, product, few, **own, fp8=True, e4m3_gradients=True)


def blackwell(name: str, shared: int, multiprocessors: int) -> Gpu:
    """A row for Blackwell: the tensor copy engine, and accumulators in tensor memory, of which 256 columns at a time
    would not fit the registers. sm_120, of the same generation, has neither and runs as Ampere."""
    logits = Tile(block_n=128, warps=4, per_multiprocessor=2)
    return Gpu(name, shared, multiprocessors, logits, product=Tile(), fp8=True)


def ampere(name: str, shared: int, multiprocessors: int, fp8: bool = False) -> Gpu:
    """A row for Ampere and others without the tensor copy engine: loads through pointers. Two of three stages lie in
    shared memory, 96 KB."""
    tile = Tile(described=False)
    return Gpu(name, shared, multiprocessors, tile, product=tile, fp8=fp8)


def cdna(name: str, shared: int, multiprocessors: int) -> Gpu:
    tile = Tile(block_n=128, block_k=32, stages=2, described=False)
    return Gpu(name, shared, multiprocessors, tile, product=tile, warp=64, fp32_products="ieee")


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

# cards that people name, by architecture
CARDS = {
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
    """The row of an architecture, such as "sm_90", or of a card, such as "H100" or "rtx4090"; None without one."""
    word = text.lower().replace(" ", "").replace("-", "")
    names = {card.lower().replace(" ", ""): name for name, cards in CARDS.items() for card in cards}
    return GPUS.get(word) or GPUS.get(names.get(word, ""))


def run_as(name: str) -> Gpu:
    """The row of an architecture. Under Triton's interpreter it has tiles for small tensors, and 4 multiprocessors, so
    that tests run the persistent loop."""
    gpu = GPUS[name]
    if not INTERPRETED:
        return gpu

    def small(tile: Tile, m: int = 32, k: int = 64) -> Tile:
        return tile._replace(block_m=m, block_n=64, block_k=k, per_multiprocessor=1)

    return gpu._replace(
        name="interpreter" if gpu.name == "sm_90" else gpu.name, multiprocessors=4,
        logits=small(gpu.logits), product=small(gpu.product, k=32), few=gpu.few and small(gpu.few, m=16),
        own_stored=(16, 64) if gpu.own_stored[1] > 0 else gpu.own_stored,
    )  # fmt: skip


HERE = os.environ.get("CHUNKED_HEAD_ARCH")  # an architecture that replaces the present GPU's, for tests; or None
if HERE is not None and HERE not in GPUS:
    raise ValueError(f"CHUNKED_HEAD_ARCH must be one of {', '.join(GPUS)}, got {HERE!r}")


@functools.cache
def gpu_of(device: torch.device) -> Gpu | None:
    """The row of the device's architecture; None where our matmuls do not run."""
    if HERE is not None:
        return run_as(HERE)
    if INTERPRETED or (device.type == "cuda" and not torch.cuda.is_available()):
        return run_as("sm_90")  # interpreted, or a plan for a GPU on a machine without one
    if device.type != "cuda":
        return None
    if torch.version.hip is not None:
        return GPUS.get(torch.cuda.get_device_properties(device).gcnArchName.split(":")[0])
    return newest(*torch.cuda.get_device_capability(device))


def newest(major: int, minor: int) -> Gpu | None:
    """The newest listed architecture of the generation ``major`` that is not newer than ``major.minor``; or None."""
    older = [f"sm_{major}{i}" for i in range(minor, -1, -1)]
    return next((GPUS[name] for name in older if name in GPUS), None)


@functools.cache
def multiprocessors_of(device: torch.device) -> int:
    """Number of multiprocessors of the device; without a GPU, the number in the table's row."""
    if device.type == "cuda" and torch.cuda.is_available():
        return torch.cuda.get_device_properties(device).multi_processor_count
    gpu = gpu_of(device)
    return 0 if gpu is None else gpu.multiprocessors


def programs_of(tile: Tile, rows: int, columns: int, device: torch.device) -> int:
    """Programs of a persistent matmul: as many as are resident at a time, and no more than it has tiles."""
    tiles = cdiv(rows, tile.block_m) * cdiv(columns, tile.block_n)
    return min(tile.per_multiprocessor * multiprocessors_of(device), tiles)


class DhiddenSplit(NamedTuple):
    """The split of dhidden's tiles in the last turn: into how many parts over the vocabulary each is cut, and for how
    many partial sums there is room."""

    pieces: int = 1
    units: int = 0


UNCUT = DhiddenSplit()
MOST_PARTS = 16
LEAST_STEPS = 4  # least steps over the vocabulary in a part
SPLITS: Cache[tuple, DhiddenSplit] = Cache(4096)  # results of ``dhidden_split``, which every chunk of every call needs


def dhidden_split(
    tile: Tile, rows: int, hidden: int, vocab: int, multiprocessors: int, most_units: int | None = None
) -> DhiddenSplit:
    """The split with which dhidden's product takes the least time, since all multiprocessors work nearly to its end.

    144 tiles on 132 multiprocessors would take two turns, the second for 12 tiles only; cut into 11 parts each, these
    take an eleventh of a turn. A part's sums go to memory and back, which takes about 0.2 % of a turn and memory, so a
    split has to save 0.5 %.
    """
    most_units = 4 * multiprocessors if most_units is None else most_units
    key = tile, rows, hidden, vocab, multiprocessors, most_units
    return SPLITS.get_or_make(key, lambda: fewest_turns(*key))


def fewest_turns(tile: Tile, rows: int, hidden: int, vocab: int, multiprocessors: int, most_units: int) -> DhiddenSplit:
    last_turn = cdiv(rows, tile.block_m) * cdiv(hidden, tile.block_n) % multiprocessors
    best, fewest = UNCUT, float("inf")
    for pieces in range(1, MOST_PARTS + 1):
        if pieces > 1 and (last_turn * pieces > most_units or pieces * LEAST_STEPS * tile.block_k > vocab):
            break
        turns = cdiv(last_turn * pieces, multiprocessors) / pieces + 0.005 * pieces
        if turns < fewest:
            best, fewest = DhiddenSplit(pieces, last_turn * pieces if pieces > 1 else 0), turns
    return best
