"""The backend of torch operations, and the choice of a call's backend."""

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.checks import BACKENDS, choice
from ..core.gpus import gpu_of
from ..core.stats import Demand, RowStats, layout_of
from . import torch_functions as functions
from .quantised import Quantised, QuantisedWeight, RoundedHead, direction_of, empty_quantised, quantise_
from .store import LogitsStore, MatmulStore, Store, vectors_of


class Backend:
    """The functions of a call that compute on tensors. Here they are torch operations, which run on every device; in
    ``TritonBackend`` they launch kernels."""

    name = "torch"
    # context manager that records the launches of a sweep; None: no kernels
    recording: Callable[..., Any] | None = None
    # True: some stores have matmuls that stop at a number of rows that only the device knows
    stops_at_device_count = False
    grad_store: type[MatmulStore] = LogitsStore  # the store of recomputed tiles whose matmul writes dlogits
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
        """Raises ValueError if the backend cannot compute on ``device`` or in ``dtype``. ``label``: name of the tensor
        of that dtype, for the message."""

    def store(self, *arguments: Any) -> type[Store]:
        """Returns the class of the store for a call that has softmaxes over the vocabulary."""
        return LogitsStore

    def traits(self, device: torch.device) -> dict[str, Any]:
        """Returns the fields of ``Sizes`` that backend and device decide, by name."""
        return {"in_blocks": True}

    def quantised(self, weight: Tensor, direction: Tensor, prints: Tensor | None = None) -> Quantised:
        """Returns a weight [rows, hidden] in e4m3 with one scale. ``common`` of the result has the product of each row
        and ``direction`` [hidden]. Writes the fingerprints of the rows to ``prints`` [rows] int32."""
        out = empty_quantised(len(weight), weight.shape[1], weight.device, has_row_scales=False)
        self.quantise_(out, weight, direction, out.common, prints)
        return out

    def fingerprints(self, weight: Tensor) -> Tensor:
        """Returns the fingerprints [rows] int32 of the rows of a 16-bit weight."""
        out = torch.empty(len(weight), dtype=torch.int32, device=weight.device)
        self.quantise_(None, weight, prints=out)
        return out

    def rounded_head(self, weight: Tensor, quantised_weight: QuantisedWeight | None) -> RoundedHead:
        """Returns a weight in e4m3, rounded here or taken from ``quantised_weight``, the caller's copy. If a row of the
        weight has changed since the copy was made, the logits of that row become nan."""
        if quantised_weight is None:
            direction = direction_of(weight)
            return RoundedHead(self.quantised(weight, direction), direction)
        prints_by_dtype, direction = quantised_weight.prints, quantised_weight.direction
        # autocast may cast the weight to other 16 bits; the first call in a dtype makes its fingerprints
        if weight.dtype not in prints_by_dtype:
            prints_by_dtype[weight.dtype] = self.fingerprints(weight)
        common = torch.empty(len(weight), dtype=torch.float32, device=weight.device)
        self.quantise_(None, weight, direction, common, expected=prints_by_dtype[weight.dtype])
        return RoundedHead(quantised_weight.matrix._replace(common=common), direction)

    def transposed(self, matrix: Tensor) -> Quantised:
        """Returns the transpose [columns, padded rows] of an e4m3 matrix [rows, columns], with a scale of 1. Zeros pad
        the rows to a multiple of 16."""
        raise NotImplementedError  # no store of torch operations multiplies gradients in e4m3

    def merge_ranks(
        self,
        out: RowStats,
        message: Tensor,  # [ranks, numbers + 1, rows] by ``Layout.message_indices``; last the tokens' check numbers
        demand: Demand,
        target: Tensor,  # [rows] int64, -1 where a row does not count
        has_target_logits: bool,  # every rank has sent the target's complete logit
        zero_or_nan: Tensor,  # [] 0, or nan if ranks have different tokens
    ) -> None:
        """Merges the statistics of a chunk's rows that all ranks have sent, each over the rank's columns of the
        vocabulary, into ``out``."""
        layout, index_of, vectors = layout_of(demand), layout_of(demand).message_indices, out.by_name
        ratios = [ratio for ratio, _ in demand.views] + [1.0]  # the last is a teacher's
        for names, ratio in zip(layout.softmaxes, ratios, strict=False):
            indices = vectors_of(names, index_of)._replace(target_logit=index_of["target_logit"])
            outputs = vectors_of(names, vectors)
            self.merge_softmax(outputs, message, zero_or_nan, target, ratio, indices, has_target_logits)
        for statistic in demand.lists:
            list_indices = [index_of[name] for name in statistic.vectors]
            pieces = [message[:, i : i + statistic.width].double().transpose(1, 2) for i in list_indices]
            for name, merged_list in zip(statistic.vectors, statistic.merge(pieces), strict=True):
                vectors[name].copy_(merged_list)

    def scale(self, source: Tensor, dtype: torch.dtype, factor: Tensor, second_factor: Tensor | None = None) -> Tensor:
        """Returns ``source`` times one or two factors [], which lie on its device, in a new tensor of ``dtype``."""
        out = torch.empty_like(source, dtype=dtype)
        if source.numel():
            self.scale_into(out, source, factor, second_factor)
        return out

    def scale_(self, tensors: Sequence[Tensor], factor: Tensor, second_factor: Tensor | None = None) -> None:
        """Multiplies each tensor in place by one or two factors []. A launch takes up to two tensors."""
        nonempty = [tensor for tensor in tensors if tensor.numel()]
        for i in range(0, len(nonempty), 2):
            self.scale_into(nonempty[i], nonempty[i], factor, second_factor, *nonempty[i + 1 : i + 2])


TORCH = Backend()


def backend_of(name: str | None, device: torch.device) -> Backend:
    """Returns the backend called ``name``, or the device's default for None. Raises ValueError if it is not
    available."""
    choice(None, "backend", name, BACKENDS)
    if name is None:
        # kernels are the default on all GPUs of NVIDIA, and on listed GPUs of AMD
        is_compiled_for = device.type == "cuda" and (torch.version.hip is None or gpu_of(device) is not None)
        name = "triton" if is_compiled_for and has_triton() else "torch"
    if name == "torch":
        return TORCH
    if not has_triton():
        raise ValueError("backend='triton' needs the package triton (pip install triton); use backend='torch'")
    return importlib.import_module(".triton.backend", __package__).TRITON  # it imports this file, and Triton


def has_triton() -> bool:
    """True where the package triton can be imported."""
    return importlib.util.find_spec("triton") is not None
