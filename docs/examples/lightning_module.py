"""Lightning with this library's head: `python docs/examples/lightning_module.py`, and again with --plain.
A model of transformers is patched in `__init__` instead, by `patch_model`; its forward then makes the loss."""

import sys

import lightning
import torch
from torch.nn.functional import cross_entropy

from chunked_head import linear_cross_entropy

VOCAB, HIDDEN = 1000, 32


class Module(lightning.LightningModule):
    def __init__(self, plain: bool) -> None:
        super().__init__()
        self.plain, self.history = plain, list[float]()
        self.embed = torch.nn.Embedding(VOCAB, HIDDEN)
        self.body = torch.nn.GRU(HIDDEN, HIDDEN, batch_first=True)
        self.head = torch.nn.Linear(HIDDEN, VOCAB, bias=False)

    def training_step(self, tokens: torch.Tensor, index: int) -> torch.Tensor:
        hidden = self.body(self.embed(tokens))[0]
        if self.plain:
            loss = cross_entropy(self.head(hidden)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        else:
            loss = linear_cross_entropy(hidden, self.head.weight, tokens, shift=1)
        self.history.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main(plain: bool = False) -> list[float]:
    lightning.seed_everything(0, verbose=False)
    module, texts = Module(plain), torch.randint(0, VOCAB, (4, 32)).expand(6, 4, 32)
    options = {"max_epochs": 1, "accumulate_grad_batches": 2, "logger": False, "enable_checkpointing": False}
    lightning.Trainer(**options, accelerator="cpu").fit(module, torch.utils.data.DataLoader(texts, batch_size=None))
    return module.history


if __name__ == "__main__":
    print(main("--plain" in sys.argv))
