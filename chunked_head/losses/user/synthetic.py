"""Made-up tokens on which a user's loss is run, and what it was seen to read there."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ...core.batch import Batch
from ...core.loss_stats import Stats
from ..base import DENSE, FIELDS, STATISTICS, Field, Summand

TOKENS, SEGMENTS, PAIRS, VOCAB, TOP, WIDTH, TRAILING = 24, 5, 3, 13, 4, 7, 2  # all different: a mix-up shows
# lengths 7, 1, 5, 9 and an empty segment; two tokens of none; segments 0 and 2 lie interleaved
SEGMENT_IDS = (0, 0, 2, 0, 2, 2, 0, 0, 2, 0, 0, 2, 1, -1, 3, 3, 3, 3, 3, 3, 3, 3, 3, -1)
MASKED = (4, 13, 19)
PIECES = (6, 1, 14, 3)


class Reads:
    """What a function was seen to read."""

    def __init__(
        self,
        required: Iterable[str] = (),
        optional: Iterable[str] = (),
        statistics: Iterable[str] = (),
        target: bool = False,
    ):
        self.required, self.optional = set(required), set(optional)
        self.statistics, self.target = set(statistics), target


class _Recording(dict):
    """Statistics or fields that say which of them were read."""

    def __init__(self, values: Mapping[str, Tensor], read: Callable[[str], None]):
        super().__init__(values)
        self.read = read

    def __getitem__(self, name: str) -> Tensor:
        self.read(name)
        return super().__getitem__(name)


class _RecordingFields(_Recording):
    """``get`` and ``in`` ask whether a field is there: it is optional then, read or not."""

    def __init__(self, values: Mapping[str, Tensor], reads: Reads):
        super().__init__(values, self._require)
        self.reads = reads

    def _require(self, name: str) -> None:
        if name not in self.reads.optional:
            self.reads.required.add(name)

    def __getitem__(self, name: str) -> Tensor:
        if not super().__contains__(name):
            if name in FIELDS:
                raise KeyError(f"field {name!r} is not there")
            raise KeyError(f"there is no field {name!r}; declare one of your own: fields={{{name!r}: 'token'}}")
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self.reads.optional |= {str(name)} - self.reads.required
        return super().__contains__(name)

    def get(self, name: str, default: Any = None) -> Any:
        there = name in self
        return self[name] if there else default

    def __iter__(self) -> Iterator[str]:
        raise TypeError("a loss names the fields that it reads: batch cannot be iterated over in losses.custom")

    keys = values = items = __iter__  # type: ignore[assignment]


class _RecordingBatch(Batch):
    def __init__(self, fields: Mapping[str, Tensor], target: Tensor, num_segments: int, vocab: int, reads: Reads):
        self.reads = reads
        super().__init__(_RecordingFields(fields, reads), target, num_segments, vocab)

    @property
    def target(self) -> Tensor:
        self.reads.target = True
        return self._target

    @target.setter
    def target(self, target: Tensor) -> None:
        self._target = target

    def segment_count(self, name: str = "segments") -> Tensor:
        # the target's shape alone would pass for reading it
        return self.segment_sum(torch.ones_like(self.mask, dtype=torch.float32), name)

    def __contains__(self, name: object) -> bool:
        return name in self.fields

    def get(self, name: str, default: Any = None) -> Any:
        return self.fields.get(name, default)


class Synthetic:
    """Made-up statistics and fields, as a call makes them: 0 and -1 where a token does not count."""

    def __init__(self, summand: Summand, extra: Mapping[str, Field]):
        tensors = list(summand.tensors.values())
        self.device = tensors[0].device if tensors else torch.device("cpu")
        self.vocab = len(tensors[0]) if tensors and tensors[0].dim() else VOCAB
        self.generator = torch.Generator().manual_seed(7)
        segments = torch.tensor(SEGMENT_IDS)
        self.mask = torch.ones(TOKENS, dtype=torch.bool).index_fill(0, torch.tensor(MASKED), False)
        self.target = torch.where(self.mask, self._integers(self.vocab, TOKENS), -1)
        kinds = FIELDS | dict(extra)
        self.fields = {name: self._field(name, kind) for name, kind in kinds.items()}
        self.fields["segments"] = self.fields["documents"] = segments
        self.fields["pairs"] = torch.tensor([[0, 1], [2, 3], [3, 0]])
        self.per_token = {name for name, kind in kinds.items() if kind.kind in ("token", "row")}

        logprob = -0.1 - 3 * self._uniform(TOKENS)
        top = self._uniform(TOKENS, TOP).softmax(-1).log() - 0.2
        self.stats = {name: 0.1 + 2 * self._uniform(TOKENS) for name in (*STATISTICS, *DENSE)} | {
            "logprob": logprob,
            "lse": 4 * self._normal(TOKENS),
            "mean_logit": self._normal(TOKENS),
            "argmax": self._integers(self.vocab, TOKENS),
            "top_logprob": logprob * 0.5,
            "topk_logprobs": top,
        }
        for name in ("old_logprobs", "ref_logprobs", "rollout_logprobs"):
            self.fields[name] = logprob + 0.3 * self._normal(TOKENS)
        self.fields["teacher_logprobs"] = top + 0.3 * self._normal(TOKENS, TOP)
        self.fields["teacher_ids"] = torch.arange(TOP).expand(TOKENS, TOP) * (self.vocab // TOP)
        for name in self.per_token:
            empty = -1 if name in ("segments", "documents") else 0
            self.fields[name] = self._counted(self.fields[name], empty)
        self.stats = {name: self._counted(value, 0) for name, value in self.stats.items()}
        for held in (self.fields, self.stats):
            held.update({name: value.to(self.device) for name, value in held.items()})
        self.mask, self.target = self.mask.to(self.device), self.target.to(self.device)
        self.upstream = self._uniform(TOKENS).to(self.device) + 0.5

    def _uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator)

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def _integers(self, below: int, *shape: int) -> Tensor:
        return torch.randint(below, shape, generator=self.generator)

    def _counted(self, values: Tensor, empty: int) -> Tensor:
        mask = self.mask.view(-1, *[1] * (values.dim() - 1))
        return torch.where(mask, values, torch.full_like(values, empty))

    def _field(self, name: str, kind: Field) -> Tensor:
        last = {
            "teacher_logits": (self.vocab,), "teacher_hidden": (WIDTH,), "teacher_weight": (self.vocab, WIDTH),
            "teacher_bias": (self.vocab,), "teacher_ids": (TOP,), "teacher_logprobs": (TOP,), "teacher_mask": (TOP,),
            "pairs": (2,),
        }.get(name, (TRAILING,) * kind.trailing)  # fmt: skip
        first = {"token": (TOKENS,), "row": (TOKENS,), "segment": (SEGMENTS,), "pair": (PAIRS,), "constant": ()}
        shape = (*first[kind.kind], *last)
        if kind.type == "float":
            return self._normal(*shape)
        return self._integers(2, *shape).to(torch.bool if kind.type == "bool" else torch.int64)

    def run(self, summand: Summand, reads: Reads, piece: slice, absent: frozenset[str] = frozenset()) -> "Run":
        """The function on some of the tokens; differentiable statistics are leaves."""
        leaves = {}
        for name, value in self.stats.items():
            leaf = value[piece].clone()
            if name not in ("argmax", "top_logprob", "teacher_entropy"):
                leaf.requires_grad_()
            leaves[name] = leaf
        fields = {
            name: (value[piece] if name in self.per_token else value).clone()
            for name, value in self.fields.items()
            if name not in absent
        }
        batch = _RecordingBatch(fields, self.target[piece], SEGMENTS, self.vocab, reads)
        stats = Stats(_Recording(leaves, reads.statistics.add))
        versions = {name: value._version for name, value in (leaves | fields).items()}
        values = summand.values(stats, batch, summand.tensors)
        reads.target |= "logprob" in reads.statistics
        written = [name for name, value in (leaves | fields).items() if value._version != versions[name]]
        return Run(values, leaves, written)


class Run:
    def __init__(self, values: Any, leaves: dict[str, Tensor], written: list[str]):
        self.values, self.leaves, self.written = values, leaves, written

    def gradients(self, upstream: Tensor) -> dict[str, Tensor]:
        leaves = {name: leaf for name, leaf in self.leaves.items() if leaf.requires_grad}
        if not self.values.requires_grad:
            return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
        total = torch.where(upstream != 0, self.values * upstream, 0.0).sum()
        found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=True)
        return dict(zip(leaves, found, strict=True))
