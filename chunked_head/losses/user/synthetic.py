"""Made-up tokens on which a user's loss is run, and what it is seen to read there."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...core.batch import Batch
from ..base import DENSE, FIELDS, STATISTICS, Field

TOKENS, SEGMENTS, PAIRS, VOCAB, TRAILING = 24, 5, 3, 13, 4  # all different: a mix-up shows
# lengths 7, 1, 5, 9 and an empty segment; two tokens of none; segments 0 and 2 lie interleaved
SEGMENT_IDS = (0, 0, 2, 0, 2, 2, 0, 0, 2, 0, 0, 2, 1, -1, 3, 3, 3, 3, 3, 3, 3, 3, 3, -1)
MASKED = (4, 13, 19)


@dataclass
class Reads:
    """What a function was seen to read."""

    required: set[str] = field(default_factory=set)
    optional: set[str] = field(default_factory=set)
    statistics: set[str] = field(default_factory=set)
    target: bool = False


class RecordingStats(dict):
    def __init__(self, values: Mapping[str, Tensor], read: Callable[[str], None]):
        super().__init__(values)
        self.read = read

    def __getitem__(self, name: str) -> Tensor:
        self.read(name)
        return super().__getitem__(name)


class RecordingFields(dict):
    """``get`` and ``in`` ask whether a field is there: it is optional then, read or not."""

    def __init__(self, values: Mapping[str, Tensor], reads: Reads):
        super().__init__(values)
        self.reads = reads

    def __missing__(self, name: str) -> Tensor:
        raise KeyError(f"there is no field {name!r}; declare one of your own: fields={{{name!r}: 'token'}}")

    def __getitem__(self, name: str) -> Tensor:
        self.reads.required |= {name} - self.reads.optional
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        if not super().__contains__(name):
            self.__missing__(str(name))
        self.reads.optional |= {str(name)} - self.reads.required
        return True

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401

    def __iter__(self) -> Iterator[str]:
        raise TypeError("a loss names the fields that it reads: batch cannot be iterated over in losses.custom")

    keys = values = items = __iter__  # type: ignore[assignment]


class RecordingBatch(Batch):
    def __init__(self, fields: Mapping[str, Tensor], target: Tensor, vocab: int, reads: Reads):
        self.reads = reads
        super().__init__(RecordingFields(fields, reads), target, SEGMENTS, vocab)

    @property
    def target(self) -> Tensor:
        self.reads.target = True
        return self._target

    @target.setter
    def target(self, target: Tensor) -> None:
        self._target = target

    def __getitem__(self, name: str) -> Tensor:
        return self.fields[name]

    def __contains__(self, name: object) -> bool:
        return name in self.fields

    def get(self, name: str, default: Any = None) -> Any:
        return self.fields.get(name, default)


class Synthetic:
    """Made-up statistics and fields, as a call makes them: 0 and -1 where a token does not count.

    ``tensors``: those of the loss, whose device and vocabulary these have."""

    def __init__(self, tensors: Mapping[str, Tensor], extra: Mapping[str, Field]):
        first = next(iter(tensors.values()), None)
        self.vocab = len(first) if first is not None and first.dim() else VOCAB
        self.device = torch.device("cpu") if first is None else first.device
        with torch.device("cpu"):  # whatever torch.set_default_device says
            self._make(extra)

    def _make(self, extra: Mapping[str, Field]) -> None:
        self.generator = torch.Generator().manual_seed(7)
        mask = torch.ones(TOKENS, dtype=torch.bool).index_fill(0, torch.tensor(MASKED), False)
        target = torch.where(mask, self._integers(self.vocab, TOKENS), -1)
        logprob = -0.1 - 3 * self._uniform(TOKENS)
        stats = {name: 0.1 + 2 * self._uniform(TOKENS) for name in (*STATISTICS, *DENSE)} | {
            "logprob": logprob,
            "lse": 4 * self._normal(TOKENS),
            "mean_logit": self._normal(TOKENS),
            "argmax": self._integers(self.vocab, TOKENS),
            "top_logprob": logprob * 0.5,
            "topk_logprobs": self._uniform(TOKENS, TRAILING).softmax(-1).log() - 0.2,
        }
        kinds = {name: kind for name, kind in (FIELDS | dict(extra)).items() if kind.kind != "kept"}
        fields = {name: self._field(kind) for name, kind in kinds.items()}
        for name in ("old_logprobs", "ref_logprobs", "rollout_logprobs"):  # near, as ratios are
            fields[name] = logprob + 0.3 * fields[name]
        fields["segments"] = fields["documents"] = torch.tensor(SEGMENT_IDS)
        fields["pairs"] = torch.tensor([[0, 1], [2, 3], [3, 0]])
        self.per_token = {name for name, kind in kinds.items() if kind.kind in ("token", "row")}
        for held in (fields, stats):
            for name, value in held.items():
                if held is stats or name in self.per_token:
                    empty = torch.full_like(value, -1 if name in ("segments", "documents") else 0)
                    held[name] = torch.where(mask.view(-1, *[1] * (value.dim() - 1)), value, empty)
        self.fields = {name: value.to(self.device) for name, value in fields.items()}
        self.stats = {name: value.to(self.device) for name, value in stats.items()}
        self.mask, self.target = mask.to(self.device), target.to(self.device)
        self.upstream = (self._uniform(TOKENS) + 0.5).to(self.device)

    def _uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator)

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def _integers(self, below: int, *shape: int) -> Tensor:
        return torch.randint(below, shape, generator=self.generator)

    def _field(self, kind: Field) -> Tensor:
        first = {"token": (TOKENS,), "row": (TOKENS,), "segment": (SEGMENTS,), "pair": (PAIRS,), "constant": ()}
        shape = (*first[kind.kind], *(TRAILING,) * kind.trailing)
        if kind.type == "float":
            return self._normal(*shape)
        return self._integers(2, *shape).to(torch.bool if kind.type == "bool" else torch.int64)

    def fields_of(self, piece: slice) -> dict[str, Tensor]:
        return {name: value[piece] if name in self.per_token else value for name, value in self.fields.items()}
