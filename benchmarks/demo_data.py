"""The demo's text: Python's own standard library (or a file the user names) and a BPE trained on it on the spot."""

import sysconfig
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

MAX_CHARACTERS = 4_000_000
HELD_OUT_EVERY = 10  # one file in ten (of a single file: its last tenth) is held out
BYTE_ALPHABET_SIZE = 256
END_OF_DOCUMENT = "<|endoftext|>"
# Installed packages and test data are not the library's own text; the last two are generated tables.
SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "encodings", "pydoc_data"}
)


class DataError(ValueError):
    """The text cannot be used; the message says why and what to do."""


@dataclass(frozen=True)
class Text:
    """Documents to train on and documents held out, with a sentence on where they come from."""

    training: list[str]
    held_out: list[str]
    description: str


@dataclass(frozen=True)
class TokenizedText:
    """Both parts as one stream of token ids each, documents separated by an end-of-document token."""

    training: npt.NDArray[np.int32]
    held_out: npt.NDArray[np.int32]
    bpe_size: int


def load_text(path: Path | None) -> Text:
    """The file at `path`, or the standard library's sources when there is none."""
    return _load_standard_library() if path is None else _load_file(path)


def tokenize_text(text: Text, bpe_vocab: int, context: int) -> TokenizedText:
    """Train a byte-level BPE on the training part, then encode both parts with it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=bpe_vocab,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.training, trainer)
    tokens = TokenizedText(
        _encode(tokenizer, text.training), _encode(tokenizer, text.held_out), tokenizer.get_vocab_size()
    )
    for name, ids in (("training", tokens.training), ("held-out", tokens.held_out)):
        if len(ids) < context + 1:
            raise DataError(
                f"the text is too short: its {name} part has {len(ids)} tokens, and one window takes "
                f"{context + 1}; use a longer --text or a smaller --context"
            )
    return tokens


def _encode(tokenizer: Tokenizer, documents: list[str]) -> npt.NDArray[np.int32]:
    end = tokenizer.token_to_id(END_OF_DOCUMENT)
    encodings = tokenizer.encode_batch(documents)
    return np.concatenate([np.asarray([*encoding.ids, end], dtype=np.int32) for encoding in encodings])


def _load_file(path: Path) -> Text:
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read --text {path} as UTF-8 text: {error}") from error
    used = content[:MAX_CHARACTERS]
    cut = len(used) - len(used) // HELD_OUT_EVERY
    of_all = f" (its first {MAX_CHARACTERS:,} of {len(content):,} characters)" if len(used) < len(content) else ""
    return Text([used[:cut]], [used[cut:]], f"{path.name}{of_all}: the last tenth is held out")


def _load_standard_library() -> Text:
    root = Path(sysconfig.get_paths()["stdlib"])
    documents: list[str] = []
    unreadable = 0
    size = 0
    for path in _sources(root):
        try:
            with tokenize.open(path) as source:  # honours the file's own coding line
                document = source.read()
        except (OSError, SyntaxError, UnicodeDecodeError):
            unreadable += 1
            continue
        if size + len(document) > MAX_CHARACTERS:
            break
        documents.append(document)
        size += len(document)
    if len(documents) < HELD_OUT_EVERY:
        raise DataError(f"only {len(documents)} readable *.py files in {root}; name a text file with --text")
    held_out = documents[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    training = [document for i, document in enumerate(documents) if i % HELD_OUT_EVERY != HELD_OUT_EVERY - 1]
    note = f", {unreadable} unreadable files left out" if unreadable else ""
    description = (
        f"Python's standard library: {len(documents)} files, {size / 1e6:.1f} M characters "
        f"(capped at {MAX_CHARACTERS / 1e6:.0f} M{note}); {len(held_out)} files held out"
    )
    return Text(training, held_out, description)


def _sources(root: Path) -> Iterator[Path]:
    for path in sorted(root.rglob("*.py")):
        if SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts):
            yield path
