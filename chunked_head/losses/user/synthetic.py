"""Made-up tokens on which a user's loss is run, and what it is seen to read there."""

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..base import DENSE, FIELDS, STATISTICS, Field
from ..batch import Batch

TOKENS, SEGMENTS, PAIRS, VOCAB, TRAILING = 24, 5, 3, 13, 4  # all different: a mix-up shows
# lengths 7, 1, 5, 9 and an empty segment; two tokens of none; segments 0 and 2 lie interleaved
SEGMENT_IDS = (0, 0, 2, 0, 2, 2, 0, 0, 2, 0, 0, 2, 1, -1, 3, 3, 3, 3, 3, 3, 3, 3, 3, -1)
MASKED = (4, 13, 19)
rand, randn = (functools.partial(draw, dtype=torch.float32) for draw in (torch.rand, torch.randn))


@dataclass
class Reads:
    """Names that a function was seen to read."""

    required: set[str] = field(default_factory=set)
    optional: set[str] = field(default_factory=set)
    statistics: set[str] = field(default_factory=set)
    target: bool = False


class RecordingStats(dict):
    def __init__(self, values: Mapping[str, Tensor], reads: Reads):
        super().__init__(values)
        self.reads = reads

    def __getitem__(self, name: str) -> Tensor:
        self.reads.statistics.add(name)
        self.reads.target |= name == "logprob"
        return super().__getitem__(name)


class RecordingBatch(Batch):
    """``get`` and ``in`` ask whether a field is there: it is optional then, read or not."""

    def __init__(self, held: Mapping[str, Tensor], target: Tensor, vocab: int, reads: Reads):
        self.held, self.reads = held, reads
        super().__init__(self, target, SEGMENTS, vocab)

    @property
    def target(self) -> Tensor:
        self.reads.target = True
        return self._target

    @target.setter
    def target(self, target: Tensor) -> None:
        self._target = target

    def __getitem__(self, name: str) -> Tensor:
        self._refuse_unknown(name)
        self.reads.required |= {name} - self.reads.optional
        return self.held[name]

    def __contains__(self, name: object) -> bool:
        self._refuse_unknown(name)
        self.reads.optional |= {str(name)} - self.reads.required
        return True

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401

    def _refuse_unknown(self, name: object) -> None:
        if name not in self.held:
            raise KeyError(f"there is no field {name!r}; declare one of your own: fields={{{name!r}: 'token'}}")

    def __iter__(self) -> Iterator[str]:
        raise TypeError("a loss names the fields that it reads: batch cannot be iterated over in losses.custom")

    def __len__(self) -> int:
        return len(self.held)


class Synthetic:
    """Made-up statistics and fields, as a call makes them: 0 and -1 where a token does not count.

    ``tensors``: those of the loss, whose vocabulary these have."""

    def __init__(self, tensors: Mapping[str, Tensor], extra: Mapping[str, Field], device: torch.device | None = None):
        first = next(iter(tensors.values()), None)
        self.vocab = len(first) if first is not None and first.dim() else VOCAB
        self.device = device or torch.device("cpu")
        # whatever torch.set_default_device says, and without a part in anyone else's random numbers
        with torch.device("cpu"), torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(7)
            self._make(extra)

    def _make(self, extra: Mapping[str, Field]) -> None:
        mask = torch.ones(TOKENS, dtype=torch.bool).index_fill(0, torch.tensor(MASKED), False)
        target = torch.where(mask, torch.randint(self.vocab, (TOKENS,)), -1)
        logprob = -0.1 - 3 * rand(TOKENS)
        stats = {name: 0.1 + 2 * rand(TOKENS) for name in (*STATISTICS, *DENSE)} | {
            "logprob": logprob,
            "lse": 4 * randn(TOKENS),
            "mean_logit": randn(TOKENS),
            "argmax": torch.randint(self.vocab, (TOKENS,)),
            "top_logprob": logprob * 0.5,
            "topk_logprobs": rand(TOKENS, TRAILING).softmax(-1).log() - 0.2,
        }
        kinds = {name: kind for name, kind in (FIELDS | dict(extra)).items() if kind.kind != "kept"}
        fields = {name: self._field(kind) for name, kind in kinds.items()}
        for name in ("old_logprobs", "ref_logprobs", "rollout_logprobs"):  # near, as ratios are
            fields[name] = logprob + 0.3 * fields[name]
        fields["segments"] = fields["documents"] = torch.tensor(SEGMENT_IDS)
        fields["pairs"] = torch.tensor([[0, 1], [2, 3], [3, 0]])
        self.per_token = {name for name, kind in kinds.items() if kind.kind in ("token", "row")}

        def clean(name: str, value: Tensor) -> Tensor:
            none = -1 if name in ("segments", "documents") else 0
            wide = mask.view(-1, *[1] * (value.dim() - 1))
            return torch.where(wide, value, torch.full_like(value, none)).to(self.device)

        self.stats = {name: clean(name, value) for name, value in stats.items()}
        self.fields = {
            name: clean(name, value) if name in self.per_token else value.to(self.device)
            for name, value in fields.items()
        }
        self.mask, self.target = mask.to(self.device), target.to(self.device)
        self.upstream = (rand(TOKENS) + 0.5).to(self.device)

    def _field(self, kind: Field) -> Tensor:
        first = {"token": (TOKENS,), "row": (TOKENS,), "segment": (SEGMENTS,), "pair": (PAIRS,), "constant": ()}
        shape = (*first[kind.kind], *(TRAILING,) * kind.trailing)
        if kind.type == "float":
            return randn(shape)
        return torch.randint(2, shape).to(torch.bool if kind.type == "bool" else torch.int64)

    def fields_of(self, piece: slice) -> dict[str, Tensor]:
        return {name: value[piece] if name in self.per_token else value for name, value in self.fields.items()}
