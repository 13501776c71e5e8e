"""A loop and a model of plain PyTorch: `python docs/examples/plain_loop.py`, and again with --plain.
The micro-batches of a step add the head's gradient to one float32 buffer: none holds one of its own."""

import sys

import torch
from torch.nn.functional import cross_entropy

from chunked_head import linear_cross_entropy

VOCAB, HIDDEN, MICRO_BATCHES, STEPS = 1000, 32, 2, 3


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCAB, HIDDEN)
        self.body = torch.nn.GRU(HIDDEN, HIDDEN, batch_first=True)
        self.head = torch.nn.Linear(HIDDEN, VOCAB, bias=False)
        self.head.weight.grad = torch.zeros_like(self.head.weight)

    def forward(self, tokens: torch.Tensor, plain: bool) -> torch.Tensor:
        hidden, weight = self.body(self.embed(tokens))[0], self.head.weight
        if plain:
            return cross_entropy(self.head(hidden)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        # the gradient is added in this forward pass: upstream says what the loss is multiplied by afterwards
        return linear_cross_entropy(hidden, weight, tokens, shift=1, accumulate_into="grad", upstream=1 / MICRO_BATCHES)


def main(plain: bool = False) -> list[float]:
    torch.manual_seed(0)
    model, texts, history = Model(), torch.randint(0, VOCAB, (MICRO_BATCHES, 4, 32)), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(STEPS):
        optimizer.zero_grad(set_to_none=False)  # keeps the buffer; before the forward passes, which add to it
        for tokens in texts:
            loss = model(tokens, plain)
            (loss / MICRO_BATCHES).backward()
            history.append(loss.item())
        optimizer.step()
    return history


if __name__ == "__main__":
    print(main("--plain" in sys.argv))
