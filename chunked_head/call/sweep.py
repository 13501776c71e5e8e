"""The loop over chunks of tokens that every call runs."""

from torch import Tensor

from ..core.stats import Coefficients, Head, Rows, RowStats
from ..stores import Store
from ..stores.gradients import Gradients
from .local_call import LocalCall

# One chunk of n tokens, of H hidden states and V columns on this rank; e: the dtype of the matmuls (bf16, fp16, fp32,
# fp64), s: the dtype of statistics (fp32, fp64 for e = fp64).
#
#   hidden [n, H] ----- store.fill -----------> rows [n, H] e         copied; 0 where a token does not count
#                                                 |
#   weight [V, H] e ---------------- @ ---------- |
#                                                 v
#                                               logits [n, V]         16 or 32 bits, as the store keeps them, in a
#                                                 |                   buffer that is used for every chunk
#                       store.statistics -------> lse, logprob, ... [n] s each         of this rank's columns
#                                                 |
#                       merge_over_ranks -------> lse, logprob, ... [n] s each         of the vocabulary: one message
#                                                 |                                    of all ranks' statistics
#   batch fields [n] -- objective.visit --------> values of losses and metrics, summed up
#                       (arithmetic)              |
#                                                 v
#                                               coefficients alpha, beta, ... [n] s each
#                                                 |
#                       store.add_gradients       v
#                          one pass             dlogits [n, V] e      over the logits, in the same buffer
#                          matmul               dlogits @ weight       -> dhidden [n, H], stored
#                          matmul               dlogits.T @ rows       -> dweight [V, H], added
#
# Where the upstream gradient must be known first, or a loss needs all tokens' statistics, the forward pass ends above
# the coefficients; backward's sweep has ``known`` statistics and coefficients and runs ``store.add_gradients`` only.
# Logits that exist are one chunk that ``fill`` finds there, and dlogits are the gradient.


def sweep(
    call: LocalCall,
    given: Tensor,  # [tokens, hidden] in the order in which rows run, or logits [..., vocab]
    head: Head,
    known: tuple[RowStats, Coefficients] | None = None,
) -> tuple[RowStats, Gradients | None]:
    """One pass over chunks of tokens: statistics, and gradients where the call makes them in this pass.

    ``known``: statistics and coefficients of all tokens, from which only gradients are made.
    """
    objective, tokens = call.objective, len(call.objective.target)
    stats = RowStats.empty(tokens, objective.demand, objective.dtype, given.device) if known is None else known[0]
    grads = call.new_gradients(given, known is not None)
    if not tokens:
        return stats, grads
    store, rows_of, spans = call.begin(given, head, stats, grads, known is not None)

    def filled(at: slice) -> tuple[Rows, RowStats]:
        rows, out = rows_of(at), stats.at(at)
        store.fill(rows, out)
        store.statistics(rows, out)
        if call.shard is not None:
            merge_over_ranks(call, store, rows, out)
        return rows, out

    for span in spans:
        every = slice(span[0].start, span[-1].stop)
        if known is None:
            for at in span:
                rows, out = filled(at)
            found = objective.visit(
                stats, every, gradient=grads is not None, closed=call.closed_spans, values=not call.teacher_last
            )
            if grads is None:
                continue
            assert found is not None
        else:
            rows, out, found = rows_of(every), stats.at(every), known[1].at(every)
        assert grads is not None
        for at in span:
            coefficients = found
            if len(span) > 1:  # only the last chunk's logits are still there
                rows, out = filled(at)
                coefficients = found.at(slice(at.start - every.start, at.stop - every.start))
            store.add_gradients(rows, out, coefficients, grads)
    if grads is not None:
        store.finish(grads)
        grads.wait()
    return stats, grads


def merge_over_ranks(call: LocalCall, store: Store, rows: Rows, out: RowStats) -> None:
    """Statistics of this rank's columns become those of the vocabulary."""
    shard, demand, merge = call.shard, call.objective.demand, call.backend.merge_ranks
    assert shard is not None
    checks = call.token_checks[rows.tokens]
    everyone = rows if call.kept is None else rows._replace(target=call.every_target[rows.tokens])
    shard.merge(merge, everyone, checks, out, demand, store.known_targets, store.pieces)
    if demand.pairing is not None:
        store.pair_statistics(rows, out)
        shard.add_pairs(out)
