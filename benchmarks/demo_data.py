"""Text to train small models on: Python's standard library, a file, or all that is installed; and a BPE of it."""

import itertools
import sysconfig
import tokenize
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

MAX_CHARACTERS = 4_000_000
BPE_CHARACTERS = 8_000_000  # that the BPE is trained on, at most
HELD_OUT_EVERY = 10  # one file in ten (of a single file: its last tenth) is held out
INSTALLED = frozenset({".py", ".md", ".rst", ".txt"})  # suffixes of sources and documentation of packages
LARGEST_FILE = 400_000  # bytes; larger files are tables that a program wrote
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
    """Streams of token ids, one for training and one held out; an end-of-document token separates documents."""

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
    sizes = itertools.accumulate(map(len, text.training))
    sample = [document for document, size in zip(text.training, sizes, strict=True) if size <= BPE_CHARACTERS]
    tokenizer.train_from_iterator(sample or text.training, trainer)
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


def load_installed(most: int) -> Text:
    """Load ``most`` characters of sources and documentation of the standard library and all installed packages.

    The order is that of checksums of their names, so that each package is met and one machine gives one text.
    """
    paths = sysconfig.get_paths()
    files = {
        path: zlib.crc32(str(path.relative_to(root)).encode())
        for root in (Path(paths["stdlib"]), Path(paths["purelib"]))
        for path in _files(root)
        if path.suffix in INSTALLED and path.stat().st_size <= LARGEST_FILE
    }
    return _load_files(sorted(files, key=files.__getitem__), most, "the standard library and installed packages")


def _load_standard_library() -> Text:
    root = Path(sysconfig.get_paths()["stdlib"])
    return _load_files(
        [path for path in _files(root) if path.suffix == ".py"], MAX_CHARACTERS, "Python's standard library"
    )


def _load_files(paths: list[Path], most: int, name: str) -> Text:
    documents: dict[str, None] = {}  # each text once
    unreadable = size = 0
    for path in paths:
        try:
            with tokenize.open(path) if path.suffix == ".py" else path.open(encoding="utf-8") as source:
                document = source.read()  # a source honours its own coding line
        except (OSError, SyntaxError, UnicodeDecodeError):
            unreadable += 1
            continue
        if document in documents:
            continue
        if size + len(document) > most:
            break
        documents[document] = None
        size += len(document)
    if len(documents) < HELD_OUT_EVERY:
        raise DataError(f"only {len(documents)} readable files of {name}; name a text file with --text")
    held_out = list(documents)[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    training = [document for i, document in enumerate(documents) if i % HELD_OUT_EVERY != HELD_OUT_EVERY - 1]
    note = f", {unreadable} unreadable files left out" if unreadable else ""
    description = (
        f"{name}: {len(documents)} files, {size / 1e6:.1f} M characters "
        f"(capped at {most / 1e6:.0f} M{note}); {len(held_out)} files held out"
    )
    return Text(training, held_out, description)


def _files(root: Path) -> Iterator[Path]:
    for path in sorted(root.rglob("*")):
        if SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts) and path.is_file():
            yield path
