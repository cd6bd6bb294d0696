"""Embed a folder of text files on a processor, and search it by meaning.

    pip install 'ringweave[cli,hf]'
    python examples/search_folder.py embed notes --model answerdotai/ModernBERT-base
    python examples/search_folder.py search notes "where do I change the oil" --model answerdotai/ModernBERT-base
    python examples/search_folder.py compare notes          # seconds, next to padded batches with SDPA

Files are cut into passages, and passages of any length are packed into rows of --row tokens: no token is padding, and
each passage attends only itself. A row bounds the memory. What was embedded lies in FOLDER/.search, a file for each few
rows, so a run that was killed goes on where it stopped, and a later run embeds only new and changed files.

--model takes any ModernBERT of transformers, by name or folder. Without it, a small one with random weights reads
bytes: it needs no download, and finds passages that share letters rather than meaning.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

import ringweave as rw
from ringweave.integrations.transformers import patch, set_pattern

Tokenize = Callable[[str], list[int]]
CONSOLE = Console()


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("task", choices=("embed", "search", "compare"))
    add("folder", type=Path)
    add("query", nargs="?", help="text to search for")
    add("--model", help="a ModernBERT of transformers, by name or folder")
    add("--files", default="*.txt,*.md,*.rst,*.py", help="names of the files, with commas between them")
    add("--passage", type=int, default=2048, help="most tokens of a passage")
    add("--row", type=int, default=16384, help="most tokens that are computed together")
    add("--batch", type=int, default=16, help="compare: passages of a padded batch")
    add("--limit", type=int, default=200, help="compare: files that are compared")
    add("--top", type=int, default=5, help="search: passages to show")
    add("--threads", type=int, help="threads of PyTorch")
    return parser.parse_args()


# ---- model -----------------------------------------------------------------------------------------------------------


class Encoder:
    """A model and its tokenizer: passages to unit vectors.

    Args:
        name: Name or folder of a ModernBERT; None for a small one with random weights, over bytes.
        attention: The word for transformers: "ringweave", or "sdpa" to compare with.
    """

    def __init__(self, name: str | None, attention: str):
        if name is None:
            sizes = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 3, "num_attention_heads": 4}
            special = {f"{kind}_token_id": 256 for kind in ("pad", "bos", "eos", "cls", "sep")}
            config = transformers.ModernBertConfig(
                vocab_size=264, max_position_embeddings=8192, attn_implementation=attention, **sizes, **special
            )
            torch.manual_seed(0)
            self.model: Any = transformers.ModernBertModel(config).eval()
            self.tokenize: Tokenize = lambda text: list(text.encode())
        else:
            self.model = transformers.AutoModel.from_pretrained(name, attn_implementation=attention).eval()
            tokenizer = transformers.AutoTokenizer.from_pretrained(name)
            self.tokenize = lambda text: tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if attention == "ringweave":
            patch(self.model)

    @torch.inference_mode()
    def packed(self, passages: list[list[int]]) -> Tensor:
        """Embed passages in one row without padding, (passages, width)."""
        lengths = [len(each) for each in passages]
        tokens = torch.tensor([list(itertools.chain(*passages))])
        # positions restart in each passage, and no passage attends another
        set_pattern(self.model, rw.Documents(lengths))
        positions = torch.cat([torch.arange(n) for n in lengths])[None]
        states = self.model(input_ids=tokens, position_ids=positions).last_hidden_state[0]
        return unit(torch.stack([part.mean(0) for part in states.split(lengths)]))

    @torch.inference_mode()
    def padded(self, passages: list[list[int]]) -> Tensor:
        """Embed passages in a batch that is padded to the longest, (passages, width)."""
        tokens = torch.nn.utils.rnn.pad_sequence([torch.tensor(each) for each in passages], True)
        real = torch.arange(tokens.shape[1]) < torch.tensor([len(each) for each in passages])[:, None]
        states = self.model(input_ids=tokens, attention_mask=real.long()).last_hidden_state
        return unit((states * real[..., None]).sum(1) / real.sum(1, keepdim=True))


def unit(x: Tensor) -> Tensor:
    """Scale vectors to length 1."""
    return torch.nn.functional.normalize(x.float(), dim=-1)


# ---- passages --------------------------------------------------------------------------------------------------------


class File(NamedTuple):
    """A text file, with what tells whether it has changed."""

    path: Path
    size: int
    changed: int

    @property
    def mark(self) -> tuple[str, int, int]:
        """The file as the index names it."""
        return str(self.path), self.size, self.changed


def files_in(folder: Path, names: str) -> list[File]:
    """List the text files of a folder, except for hidden ones."""
    found = sorted({path for name in names.split(",") for path in folder.rglob(name)})
    visible = (path for path in found if not any(part.startswith(".") for part in path.relative_to(folder).parts))
    stats = ((path, path.stat()) for path in visible if path.is_file())
    return [File(path.relative_to(folder), about.st_size, about.st_mtime_ns) for path, about in stats if about.st_size]


def passages_of(text: str, tokenize: Tokenize, most: int) -> list[list[int]]:
    """Cut a text into passages of at most ``most`` tokens."""
    tokens = tokenize(text)
    return [tokens[at : at + most] for at in range(0, len(tokens), most)]


def rows(passages: Iterable[list[int]], most: int) -> Iterator[list[list[int]]]:
    """Fill rows of at most ``most`` tokens with passages, in order."""
    row: list[list[int]] = []
    for passage in passages:
        if row and sum(map(len, row)) + len(passage) > most:
            yield row
            row = []
        row.append(passage)
    if row:
        yield row


# ---- index -----------------------------------------------------------------------------------------------------------


class Index:
    """Embeddings of a folder: files of vectors, each with the passages that they belong to.

    Args:
        folder: The folder of texts.
        settings: What the vectors depend on besides the texts; other settings have an index of their own.
    """

    def __init__(self, folder: Path, settings: tuple[object, ...]):
        name = hashlib.sha256(repr(settings).encode()).hexdigest()[:12]
        self.folder = folder / ".search" / name
        self.folder.mkdir(parents=True, exist_ok=True)

    def parts(self) -> Iterator[tuple[list[File], list[tuple[int, int]], Tensor]]:
        """Return the files, the (file, passage) of each vector, and the vectors of each part, oldest first."""
        for path in sorted(self.folder.glob("*.npz")):
            with np.load(path) as part:
                about = json.loads(str(part["about"]))
                files = [File(Path(name), size, changed) for name, size, changed in about["files"]]
                yield files, [tuple(each) for each in about["passages"]], torch.from_numpy(part["vectors"])

    def add(self, files: list[File], passages: list[tuple[int, int]], vectors: Tensor) -> None:
        """Write a part whole or not at all."""
        path = self.folder / f"{time.time_ns():020}.npz"
        writing = path.with_suffix(".writing")
        about = json.dumps({"files": [each.mark for each in files], "passages": passages})
        with writing.open("wb") as file:
            np.savez(file, about=np.array(about), vectors=vectors.numpy())
        writing.replace(path)


# ---- tasks -----------------------------------------------------------------------------------------------------------


def embed(given: argparse.Namespace, encoder: Encoder, index: Index) -> None:
    """Embed the files that the index does not have."""
    known = {file.mark for files, _, _ in index.parts() for file in files}
    files = files_in(given.folder, given.files)
    new = [file for file in files if file.mark not in known]
    CONSOLE.print(f"{len(files):,} files, {len(new):,} new or changed")
    if not new:
        return
    with Progress(console=CONSOLE) as progress:
        bar = progress.add_task("embedding", total=sum(file.size for file in new))
        group: list[File] = []
        passages: list[list[int]] = []
        where: list[tuple[int, int]] = []
        for file in new:
            text = (given.folder / file.path).read_text("utf-8", errors="replace")
            own = passages_of(text, encoder.tokenize, given.passage)
            where += [(len(group), n) for n in range(len(own))]
            group.append(file)
            passages += own
            # a part has whole files, so that one which was interrupted is embedded again
            if sum(map(len, passages)) >= given.row or file is new[-1]:
                if passages:
                    vectors = torch.cat([encoder.packed(row) for row in rows(passages, given.row)])
                    index.add(group, where, vectors)
                progress.advance(bar, sum(each.size for each in group))
                group, passages, where = [], [], []


def search(given: argparse.Namespace, encoder: Encoder, index: Index) -> None:
    """Show the passages nearest to the query."""
    wanted = encoder.packed([encoder.tokenize(given.query)[: given.passage]])[0]
    now = {file.path: file.mark for file in files_in(given.folder, given.files)}
    found: dict[tuple[Path, int], float] = {}
    for files, passages, vectors in index.parts():
        for (at, passage), score in zip(passages, (vectors @ wanted).tolist(), strict=True):
            # a file that has changed since is not shown
            if now.get(files[at].path) == files[at].mark:
                found[files[at].path, passage] = score
    if not found:
        CONSOLE.print("nothing is embedded: run the task embed first")
    for (path, passage), score in sorted(found.items(), key=lambda item: -item[1])[: given.top]:
        CONSOLE.print(f"{score:.3f}  {path}, passage {passage + 1}", highlight=False, markup=False)


def compare(given: argparse.Namespace, encoder: Encoder) -> None:
    """Time packed rows, and padded batches with PyTorch's attention, on the same threads."""
    peer = Encoder(given.model, "sdpa")
    texts = (given.folder / file.path for file in files_in(given.folder, given.files)[: given.limit])
    passages = [
        passage
        for path in texts
        for passage in passages_of(path.read_text("utf-8", errors="replace"), encoder.tokenize, given.passage)
    ]
    # padding is least where batches have passages of equal length
    passages.sort(key=len)
    batches = [passages[at : at + given.batch] for at in range(0, len(passages), given.batch)]
    ways: dict[str, Callable[[], Tensor]] = {
        "packed rows, ringweave": lambda: torch.cat([encoder.packed(row) for row in rows(passages, given.row)]),
        f"padded batches of {given.batch} by length, SDPA": lambda: torch.cat([peer.padded(each) for each in batches]),
    }
    tokens = sum(map(len, passages))
    CONSOLE.print(f"{len(passages):,} passages, {tokens:,} tokens, {torch.get_num_threads()} threads")
    vectors = {}
    for name, way in ways.items():
        started, used = time.perf_counter(), time.process_time()
        vectors[name] = way()
        wall, cpu = time.perf_counter() - started, time.process_time() - used
        CONSOLE.print(f"{name}: {wall:.1f} s, {cpu:.1f} s of processor time, {tokens / wall:,.0f} tokens/s")
    ours, theirs = vectors.values()
    CONSOLE.print(f"largest difference of an element: {float((ours - theirs).abs().max()):.1e}")


def main() -> None:
    """Run the task."""
    given = arguments()
    if given.threads:
        torch.set_num_threads(given.threads)
    transformers.logging.set_verbosity_error()
    encoder = Encoder(given.model, "ringweave")
    if given.task == "compare":
        return compare(given, encoder)
    if given.task == "search" and not given.query:
        raise SystemExit("search needs a text to search for")
    index = Index(given.folder, (given.model, given.passage))
    return (embed if given.task == "embed" else search)(given, encoder, index)


if __name__ == "__main__":
    main()
