"""A process of `turns.py`: steps of the ``chunked_head`` on its path, or bare products; requests and answers are JSON.

It imports nothing else of the benchmarks, since a checkout's own would be found first.
"""

import gc
import json
import math
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

BARE = "--products" in sys.argv
if not BARE:
    import chunked_head
    from chunked_head import losses, metrics
ROWS = 1024  # of the reference's logits at a time
PRODUCTS_OF = {"logprobs": 1, "logprobs-late": 4, "forward_kl": 4, "reverse_kl": 4, "jsd": 4, "tvd": 4}


def draw(tokens: int, hidden: int, vocab: int, kind: str = "flat") -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, weight and targets. "flat": logits of deviation 2, any targets. "zipf": ids of frequency 1 / rank
    in any order, by a direction that all hidden states share. "peaked": half of the tokens are sure of their targets.
    """
    generator = torch.Generator("cuda").manual_seed(1)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, device="cuda", generator=generator)

    states, weight = normal(tokens, hidden), normal(vocab, hidden).mul_(2 / math.sqrt(hidden))
    target = torch.randint(vocab, (tokens,), device="cuda", generator=generator)
    if kind == "zipf":
        log_p = -torch.arange(1, vocab + 1, device="cuda").float().log()
        log_p = log_p[torch.randperm(vocab, device="cuda", generator=generator)].log_softmax(0)
        target = torch.multinomial(log_p.exp(), tokens, replacement=True, generator=generator)
        direction = torch.nn.functional.normalize(normal(hidden), dim=0)
        states += math.sqrt(hidden) * direction
        weight += (log_p - log_p.mean())[:, None] * (direction / math.sqrt(hidden))
    elif kind == "peaked":
        half = tokens // 2
        weight.index_add_(0, target[:half], 12 / hidden * states[:half])
    return states.bfloat16(), weight.bfloat16(), target


class Step:
    """A step of one case: operands, a loss, and their gradients."""

    def __init__(self, case: str):
        sizes, self.loss, *options = case.split(":")
        tokens, hidden, vocab = map(int, sizes.split("x"))
        self.sizes = tokens, hidden, vocab
        self.options: dict[str, Any] = {}
        for text in options[0].split(",") if options else ():
            name, value = text.split("=")
            self.options[name] = torch.float32 if value == "float32" else int(value) if value.isdigit() else value
        self.plan = ""
        self.use(*draw(*self.sizes))

    def use(self, hidden: Tensor, weight: Tensor, target: Tensor) -> None:
        self.hidden, self.weight, self.target = hidden.requires_grad_(), weight.requires_grad_(), target
        generator = torch.Generator("cuda").manual_seed(2)
        self.batch: dict[str, Tensor] = {}
        if BARE:
            self.rows = max(1, min(len(hidden), (6 << 30) // (2 * len(weight))))
            self.logits = hidden.new_empty(self.rows, len(weight))
            self.d_hidden, self.d_weight = torch.empty_like(hidden), torch.empty_like(weight)
            return
        if self.loss == "grpo":
            with torch.no_grad():
                old = chunked_head.linear_logprobs(hidden, weight, target)
            noise = torch.randn(old.shape, device="cuda", generator=generator)
            self.batch = {"old_logprobs": (old + 0.1 * noise).clamp(max=0), "advantages": noise.flip(0)}
        elif PRODUCTS_OF.get(self.loss) == 4 and self.loss != "logprobs-late":
            teacher = draw(*self.sizes)
            self.batch = {"teacher_hidden": teacher[0].roll(1, 0), "teacher_weight": teacher[1]}

    @torch.no_grad()
    def multiply(self, products: int) -> None:
        for start in range(0, len(self.hidden), self.rows):
            hidden = self.hidden[start : start + self.rows]
            logits = self.logits[: len(hidden)]
            for _ in range(max(1, products - 2)):
                torch.mm(hidden, self.weight.T, out=logits)
            if products == 1:
                continue
            torch.mm(logits, self.weight, out=self.d_hidden[start : start + self.rows])
            if start == 0:
                torch.mm(logits.T, hidden, out=self.d_weight)
            else:
                torch.addmm(self.d_weight, logits.T, hidden, out=self.d_weight)

    def __call__(self) -> None:
        if BARE:
            return self.multiply(PRODUCTS_OF.get(self.loss, 3))
        self.hidden.grad = self.weight.grad = None
        operands = self.hidden, self.weight, self.target
        if self.loss == "ce":
            chunked_head.linear_cross_entropy(*operands, **self.options).backward()
        elif self.loss == "logprobs":
            with torch.no_grad():
                chunked_head.linear_logprobs(*operands, **self.options)
        elif self.loss == "logprobs-late":
            chunked_head.linear_logprobs(*operands, **self.options).sum().backward()
        else:
            measured = []
            if self.loss == "grpo":
                loss = losses.grpo() + 1e-4 * losses.z_loss() - 0.01 * losses.entropy()
                clipped = metrics.clip_fraction(side="low"), metrics.clip_fraction(side="high")
                measured = [metrics.ratio(), metrics.kl_old(), *clipped]
            elif self.loss == "ce+z":
                loss, measured = (
                    losses.cross_entropy() + 1e-4 * losses.z_loss(),
                    [metrics.entropy(), metrics.accuracy()],
                )
            else:
                loss = getattr(losses, self.loss)()
            out = chunked_head.linear_loss(*operands, loss, batch=self.batch, metrics=measured, **self.options)
            assert out.plan is not None
            self.plan = f"{out.plan.chunks} x {out.plan.chunk_tokens}, {str(out.plan.weight_accumulate)[6:]}"
            out.loss.backward()


def relative(value: Tensor | None, exact: Tensor) -> float:
    assert value is not None
    pairs = zip(value.split(4096), exact.split(4096), strict=True)
    squares = sum(float((a.float() - b).square().sum()) for a, b in pairs)
    return math.sqrt(squares / sum(float(b.square().sum()) for b in exact.split(4096)))


def errors(step: Step, kind: str) -> dict[str, float]:
    """Relative errors of cross-entropy's gradients, and the rms error of log-probabilities, against float32."""
    hidden, weight, target = draw(*step.sizes, kind=kind)
    torch.backends.cuda.matmul.allow_tf32 = False
    wide, exact_weight = weight.float(), torch.zeros(weight.shape, device="cuda")
    exact_hidden, logprobs = torch.empty(hidden.shape, device="cuda"), torch.empty(len(hidden), device="cuda")
    for start in range(0, len(hidden), ROWS):
        rows, ids = hidden[start : start + ROWS].float(), target[start : start + ROWS]
        logits = (rows @ wide.T).log_softmax(1)
        logprobs[start : start + ROWS] = logits.gather(1, ids[:, None]).squeeze(1)
        logits.exp_()
        logits[torch.arange(len(ids)), ids] -= 1
        exact_hidden[start : start + ROWS] = logits @ wide
        exact_weight.addmm_(logits.T, rows)
        del logits
    del wide
    before = step.hidden, step.weight, step.target
    step.use(hidden, weight, target)
    step.hidden.grad = step.weight.grad = None
    chunked_head.linear_cross_entropy(step.hidden, step.weight, step.target, **step.options).backward()
    with torch.no_grad():
        own = chunked_head.linear_logprobs(step.hidden, step.weight, step.target)
    tokens, d_hidden, d_weight = len(hidden), step.hidden.grad, step.weight.grad
    found = {
        "dhidden": relative(d_hidden, exact_hidden.div_(tokens)),
        "dweight": relative(d_weight, exact_weight.div_(tokens)),
        "logprob": float((own - logprobs).square().mean().sqrt()),
    }
    step.hidden, step.weight, step.target = before
    return found


def memory(step: Step) -> dict[str, Any]:
    """Peak bytes of a step over its operands, gradients included."""
    step()
    step.hidden.grad = step.weight.grad = None
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return {"peak_bytes": torch.cuda.max_memory_allocated() - before, "plan": step.plan or planned(step)}


def planned(step: Step) -> str:
    tokens, hidden, vocab = step.sizes
    made = chunked_head.plan(tokens, hidden, vocab, torch.bfloat16, device="cuda", **step.options)
    return f"{made.chunks} x {made.chunk_tokens}, {str(made.weight_accumulate)[6:]}"


def turn(step: Callable[[], None], settle: float, seconds: float) -> dict[str, float]:
    """Milliseconds of a step in a stretch of ``seconds``, after one of ``settle``."""
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    each = (time.perf_counter() - begin) / 3
    for _ in range(math.ceil(settle / each)):
        step()
    count = max(3, math.ceil(seconds / each))
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        step()
    end.record()
    torch.cuda.synchronize()
    return {"ms": start.elapsed_time(end) / count}


def main() -> None:
    step: Step | None = None
    answers, sys.stdout = sys.stdout, sys.stderr  # what others print is no answer
    for line in sys.stdin:
        request = json.loads(line)
        action = request.pop("do")
        answer: dict[str, Any]
        try:
            if action == "prepare":
                step, answer = Step(request["case"]), {}
            elif action == "clear":
                step, answer = None, {}
                gc.collect()
                torch.cuda.empty_cache()
            else:
                assert step is not None
                if action == "errors":
                    answer = errors(step, request["data"])
                    gc.collect()
                    torch.cuda.empty_cache()
                else:
                    answer = memory(step) if action == "memory" else turn(step, **request)
        except Exception as error:  # a row of the table says so
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
