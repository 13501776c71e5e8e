"""A call's fields and teacher where ranks share the vocabulary or the tokens."""

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from ..losses.base import Field
from ..parallel.hidden_rows import interleaved
from ..parallel.shard import Shard
from .fields import Frame
from .head_options import HeadOptions, LogitsOptions


def whole_teacher(head: HeadOptions | LogitsOptions, batch: Mapping[str, Tensor], rows: int) -> int:
    """Ids of the teacher's vocabulary; ``rows`` of it are here."""
    if head.shard is None:
        return rows
    if head.shard.parallel.sequence_sharded and "teacher_logits" in batch:
        raise ValueError(
            "batch['teacher_logits'] of this rank's tokens and ids lack those of other ranks' tokens, which "
            "sequence_sharded=True needs; give teacher_hidden and teacher_weight"
        )
    if rows != head.held:
        raise ValueError(
            f"the teacher has {rows} rows of its vocabulary on this rank and the student {head.held}: "
            "VocabParallel takes a teacher of the same vocabulary, split as the student is; of two the ids "
            "on a rank would be others"
        )
    return head.vocab


def of_all_ranks(
    shard: Shard,
    head: HeadOptions,
    batch: dict[str, Tensor],
    wanted: Sequence[str],
    known: dict[str, Field],
    frame: Frame,
) -> tuple[Tensor | None, dict[str, Tensor], Frame]:
    """Targets and fields of every rank's tokens, where each has hidden states of its own."""
    dims = len(frame.leading)
    own = {name: batch[name].flatten(0, dims - 1) for name in wanted if known[name].kind in ("token", "row")}
    if head.target is not None:
        own["target"] = head.target.reshape(-1)
    count = math.prod(frame.leading)
    fields = {"tokens": str(count), "batch": str(sorted(own))}
    fields |= {f"batch[{name!r}]": f"{list(value.shape[1:])} {value.dtype}" for name, value in own.items()}
    shard.agreed_on(fields, frame.device)
    whole = {name: interleaved(value, shard.group) for name, value in own.items()}
    target = whole.pop("target", None)
    return target, {**batch, **whole}, frame._replace(leading=(count * shard.parallel.ranks,))
