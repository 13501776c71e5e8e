"""Random shapes and options against the oracle."""

import torch
from budget import assert_outcome
from cases import Case, Place, bias, per_class, per_token, run_ours, run_reference
from hypothesis import given, seed, settings
from hypothesis import strategies as st

SEED = 1
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "bias": st.just(bias),
        "class_weights": st.just(per_class),
        "token_weights": st.just(per_token),
        "label_smoothing": st.sampled_from([0.0, 0.1, 1.0]),
        "z_loss": st.sampled_from([1e-4, 0.3]),
        "softcap": st.sampled_from([2.0, 30.0]),
        "logit_scale": st.sampled_from([0.1, -1.3, 3.0]),
        "shift": st.integers(0, 3),
        "reduction": st.sampled_from(["mean", "sum", "none"]),
        "ignore_index": st.sampled_from([-100, -1, 0, 2]),
    },
)
LEADING = st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple)


def check(place: Place, dtype: torch.dtype, case: Case) -> None:
    inputs = case.inputs(dtype, place.device)
    truth, eager = run_reference(inputs, torch.float64), run_reference(inputs, dtype)
    assert_outcome(run_ours(inputs, place), eager, truth, dtype)


# A pinned draw: a submission must not pass or fail by luck. Of other draws about one in four thousand finds a call of a
# few tokens in fp32 whose error is up to 1.1 times the budget, where eager happens to err by an ulp.
@seed(SEED)
@settings(max_examples=250, deadline=None)
@given(
    leading=LEADING, hidden=st.integers(1, 40), vocab=st.integers(2, 90), options=OPTIONS,
    chunk=st.integers(1, 60), ignored=st.sampled_from([0.0, 0.3, 1.1]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)  # fmt: skip
def test_torch(leading, hidden, vocab, options, chunk, ignored, dtype) -> None:
    schedule = {"chunk_tokens": chunk} | ({} if dtype == torch.float32 else {"accumulate_dtype": torch.float32})
    check(Place("torch", "cpu"), dtype, Case("", leading, hidden, vocab, options, schedule, ignored))


if not torch.cuda.is_available():

    @seed(SEED)
    @settings(max_examples=40, deadline=None)
    @given(
        leading=st.lists(st.integers(0, 4), min_size=1, max_size=2).map(tuple),
        hidden=st.sampled_from([8, 24, 40, 7]), vocab=st.integers(2, 150), options=OPTIONS, chunk=st.integers(4, 60),
        dtype=st.sampled_from([torch.float32, torch.float16]),
    )  # fmt: skip
    def test_triton_interpreted(leading, hidden, vocab, options, chunk, dtype) -> None:
        schedule = {"chunk_tokens": chunk}
        check(Place("triton", "cpu"), dtype, Case("", leading, hidden, vocab, options, schedule))
