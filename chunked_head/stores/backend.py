"""``Backend``: the functions that compute, as torch operations for every device. ``triton/backend.py`` replaces them by
Triton kernels."""

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.checks import BACKENDS, choice
from ..core.gpus import gpu_of
from ..core.records import MessageIndices
from ..core.stats import RowStats, layout_of
from ..parallel.merge import GatheredStats
from . import torch_functions as functions
from .quantised import Quantised, QuantisedWeight, RoundedHead, direction_of, empty_quantised, quantise_
from .store import LogitsStore, MatmulStore, Store, outputs_of


class Backend:
    """The functions that compute, as torch operations on every device; ``TritonBackend`` replaces them by kernels."""

    name = "torch"
    recording: Callable[..., Any] | None = None  # listens to a sweep, ``kernels/common/recording.py``
    bounds_rows = False  # some stores have matmuls that stop at a number of rows which only the device knows
    grad_store: type[MatmulStore] = LogitsStore  # of recomputed tiles whose matmul stores dlogits
    read_targets = staticmethod(functions.read_targets)
    read_fields = staticmethod(functions.read_fields)
    clean_rows = staticmethod(functions.clean_rows)
    row_stats = staticmethod(functions.row_stats)
    sums = staticmethod(functions.sums)
    row_grad = staticmethod(functions.row_grad)
    kept_sets = staticmethod(functions.kept_sets)
    dot_columns = staticmethod(functions.dot_columns)
    set_stats = staticmethod(functions.set_stats)
    set_grad = staticmethod(functions.set_grad)
    add_rows = staticmethod(functions.add_rows)
    sum_rows = staticmethod(functions.sum_rows)
    scale_into = staticmethod(functions.scale)
    scale_rows = staticmethod(functions.scale_rows)
    merge_softmax = staticmethod(functions.merge_softmax)
    quantise_ = staticmethod(quantise_)

    def check(self, device: torch.device, dtype: torch.dtype, label: str) -> None:
        """Raises ValueError if the backend cannot compute on ``device``, or not in ``dtype``, which the tensor called
        ``label`` has."""

    def store(self, *arguments: Any) -> type[Store]:
        """The class of the store for a call's chunks. It is asked for if some token's softmax is over the
        vocabulary."""
        return LogitsStore

    def traits(self, device: torch.device) -> dict[str, Any]:
        """Those fields of ``Sizes``, by name, that the backend and the device decide."""
        return {"in_blocks": True}

    def quantised(self, weight: Tensor, direction: Tensor, prints: Tensor | None = None) -> Quantised:
        """A weight in e4m3 by one scale, with its products with ``direction`` [hidden]. ``prints`` [rows] int32:
        memory to which the fingerprints of its rows are written."""
        out = empty_quantised(len(weight), weight.shape[1], weight.device, each_row=False)
        self.quantise_(out, weight, direction, out.common, prints)
        return out

    def fingerprints(self, weight: Tensor) -> Tensor:
        """[rows] int32 fingerprints of a 16-bit weight's rows, which later calls compare."""
        out = torch.empty(len(weight), dtype=torch.int32, device=weight.device)
        self.quantise_(None, weight, prints=out)
        return out

    def rounded_head(self, weight: Tensor, quantised_weight: QuantisedWeight | None) -> RoundedHead:
        """The e4m3 operand of a weight for any hidden states. ``quantised_weight``: the caller's copy in e4m3.
        Logits of a row of the weight that has changed since the copy was made are nan."""
        if quantised_weight is None:
            direction = direction_of(weight)
            return RoundedHead(self.quantised(weight, direction), direction)
        # 16 bits that autocast casts to others: from the first call on
        if weight.dtype not in quantised_weight.prints:
            quantised_weight.prints[weight.dtype] = self.fingerprints(weight)
        direction, prints = quantised_weight.direction, quantised_weight.prints[weight.dtype]
        common = torch.empty(len(weight), dtype=torch.float32, device=weight.device)
        self.quantise_(None, weight, direction, common, expected=prints)
        return RoundedHead(quantised_weight.matrix._replace(common=common), direction)

    def transposed(self, matrix: Tensor) -> Quantised:
        """The transpose of an e4m3 matrix [rows, columns], with a scale of 1: [columns, padded rows], with zeros up to
        a multiple of 16 rows."""
        raise NotImplementedError  # no store of torch operations multiplies gradients in e4m3

    def merge_ranks(self, gathered: GatheredStats, out: RowStats) -> None:
        """Merges statistics of pieces of the vocabulary into ``out``, statistics of the whole vocabulary; nan if the
        pieces are of different tokens."""
        (message, demand, targets, known_targets, zero_or_nan), stats = gathered, out.by_name
        _, place_of, softmaxes = layout_of(demand)
        ratios = [ratio for ratio, _ in demand.views] + [1.0]  # and of a teacher
        for softmax, ratio in zip(softmaxes, ratios, strict=False):
            vectors = tuple([place_of[name] for _, names in softmax.statistics for name in names])
            places = MessageIndices(
                place_of[softmax.lse_base], place_of[softmax.neg_log_sum], place_of["target_logit"], vectors
            )
            outputs = outputs_of(stats, softmax)
            self.merge_softmax(outputs, message, zero_or_nan, targets, ratio, places, known_targets)
        for statistic in demand.lists:
            list_places = [place_of[name] for name in statistic.vectors]
            pieces = [message[:, place : place + statistic.width].double().transpose(1, 2) for place in list_places]
            for name, merged in zip(statistic.vectors, statistic.merge(pieces), strict=True):
                stats[name].copy_(merged)

    def scale(self, source: Tensor, dtype: torch.dtype, factor: Tensor, second_factor: Tensor | None = None) -> Tensor:
        """``source`` times one or two factors [], which are on the device, in a new tensor of ``dtype``."""
        out = torch.empty_like(source, dtype=dtype)
        if source.numel():
            self.scale_into(out, source, factor, second_factor)
        return out

    def scale_(self, tensors: Sequence[Tensor], factor: Tensor, second_factor: Tensor | None = None) -> None:
        """Multiplies tensors by one or two factors [] in place, two tensors in one launch."""
        filled = [tensor for tensor in tensors if tensor.numel()]
        for i in range(0, len(filled), 2):
            self.scale_into(filled[i], filled[i], factor, second_factor, *filled[i + 1 : i + 2])


TORCH = Backend()


def backend_of(name: str | None, device: torch.device) -> Backend:
    """The backend called ``name``; the device's default for None. ValueError for a backend that is not available."""
    choice(None, "backend", name, BACKENDS)
    if name is None:
        # our kernels are the default on NVIDIA's GPUs, and on those of AMD's that they were compiled for
        has_kernels = (
            device.type == "cuda" and has_triton() and (torch.version.hip is None or gpu_of(device) is not None)
        )
        name = "triton" if has_kernels else "torch"
    if name == "torch":
        return TORCH
    if not has_triton():
        raise ValueError("backend='triton' needs the package triton (pip install triton); use backend='torch'")
    return importlib.import_module(".triton.backend", __package__).TRITON  # it imports this file, and Triton


def has_triton() -> bool:
    """True where the package triton can be imported."""
    return importlib.util.find_spec("triton") is not None
