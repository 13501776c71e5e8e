"""Text for `trained_head`: sources and documentation that any Python installation brings, as tokens of a BPE.

    python -m benchmarks.trained_text --vocab 65536 --megabytes 90 --output tokens.npz

No network is needed. Files are taken in the order of a hash of their contents, so that the same installation gives the
same tokens, each once, and every fiftieth is held out.
"""

import argparse
import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

SUFFIXES = frozenset({".py", ".pyi", ".md", ".rst", ".h", ".hpp", ".cuh", ".c", ".cpp"})
LARGEST_FILE = 400_000  # bytes; what is larger is mostly generated
HELD_OUT_EVERY = 50  # files
END_OF_DOCUMENT = "<|endoftext|>"


@dataclass(frozen=True)
class Tokens:
    """Streams of token ids, documents separated by an end-of-document token."""

    training: npt.NDArray[np.uint16]
    held_out: npt.NDArray[np.uint16]
    vocab: int
    description: str

    def save(self, path: Path) -> None:
        np.savez_compressed(
            path, training=self.training, held_out=self.held_out, vocab=self.vocab, description=self.description
        )

    @classmethod
    def load(cls, path: Path) -> "Tokens":
        with np.load(path) as data:
            return cls(data["training"], data["held_out"], int(data["vocab"]), str(data["description"]))


def make_tokens(vocab: int, megabytes: float) -> Tokens:
    """A BPE of `vocab` tokens trained on the training files alone, and both parts encoded with it."""
    documents = gather(int(megabytes * 1e6))
    held_out = documents[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    training = [text for i, text in enumerate(documents) if i % HELD_OUT_EVERY != HELD_OUT_EVERY - 1]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training, trainer)
    if tokenizer.get_vocab_size() > 1 << 16:
        raise ValueError(f"--vocab must be at most {1 << 16}, so that ids fit 16 bits, got {vocab}")
    sizes = f"{sum(map(len, documents)) / 1e6:.0f} M characters in {len(documents)} files"
    return Tokens(
        encode(tokenizer, training), encode(tokenizer, held_out), tokenizer.get_vocab_size(),
        f"sources and documentation of an installed Python and its packages: {sizes}, {len(held_out)} files held out",
    )  # fmt: skip


def encode(tokenizer: Tokenizer, documents: list[str]) -> npt.NDArray[np.uint16]:
    end = tokenizer.token_to_id(END_OF_DOCUMENT)
    pieces = []
    for start in range(0, len(documents), 1000):
        encodings = tokenizer.encode_batch_fast(documents[start : start + 1000])
        pieces += [np.asarray([*encoding.ids, end], dtype=np.uint16) for encoding in encodings]
    return np.concatenate(pieces)


def gather(size: int) -> list[str]:
    """Distinct documents of `size` bytes in all, in the order of their hashes."""
    found: dict[bytes, Path] = {}
    for path in files():
        found.setdefault(hashlib.sha256(path.read_bytes()).digest(), path)
    documents: list[str] = []
    total = 0
    for key in sorted(found):
        if total >= size:
            break
        try:
            documents.append(found[key].read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            continue
        total += len(documents[-1].encode())
    return documents


def files() -> Iterator[Path]:
    paths = sysconfig.get_paths()
    for root in dict.fromkeys(Path(paths[name]) for name in ("stdlib", "purelib", "platlib")):
        for path in root.rglob("*"):
            if path.suffix in SUFFIXES and path.is_file() and 500 < path.stat().st_size <= LARGEST_FILE:
                yield path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=65536)
    parser.add_argument("--megabytes", type=float, default=90.0)
    parser.add_argument("--output", type=Path, default=Path("tokens.npz"))
    arguments = parser.parse_args()
    tokens = make_tokens(arguments.vocab, arguments.megabytes)
    tokens.save(arguments.output)
    print(f"{tokens.description}: {len(tokens.training):,} tokens to train on, {len(tokens.held_out):,} held out")


if __name__ == "__main__":
    main()
