"""``foretoken build-datastore``: tokenize files and sort them, for the retrieval method to draft from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from foretoken import zoo
from foretoken.cli.grouped import grouped, option
from foretoken.cli.options import MODEL, Json
from foretoken.core.artifacts import DATASTORE, PROVENANCE, Destination
from foretoken.core.errors import InvalidRequest
from foretoken.core.files import write_json

PIECE = 1 << 20  # characters that are tokenized together; longer documents are split


@grouped
def build_datastore(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write.")],
    data: Annotated[list[Path], typer.Option(help="A text file, or a folder of .py, .md and .txt (repeatable).")],
    model: str | None = option(None, "The target it is for: its tokenizer is used. [bundled]", *MODEL),
    force: bool = option(False, "Replace an earlier datastore in OUT.", "--force"),
    as_json: Json = False,
) -> None:
    """Build a datastore: then --speculative-config '{"method": "retrieval", "model": "OUT"}'."""
    from foretoken.core.progress import Reporter
    from foretoken.models.formats.checkpoint import load_tokenizer, resolve
    from foretoken.propose.datastore import DatastoreWriter

    path = resolve(model) if model is not None else zoo.path("target")
    destination, files = Destination.checked(out, DATASTORE, (path, *data), force), _files(data)
    tokenizer = load_tokenizer(path)
    with destination.folder() as folder, Reporter("build-datastore") as reporter:
        writer = DatastoreWriter(folder, tokenizer)
        size, done = sum(file.stat().st_size for file in files), 0
        for texts in _batches(files):
            # verbose=False: documents may exceed the model's context length.
            for ids in tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]:
                writer.add(ids)
            done += sum(len(text.encode()) for text in texts)
            reporter.update(min(1.0, done / max(1, size)), f"{writer.tokens / 1e6:.1f} M tokens")
        writer.close()
        write_json(folder / PROVENANCE, {"model": model or "bundled target", "data": data, "files": len(files)})
    out = destination.path
    facts = {"path": str(out), "tokens": writer.tokens, "documents": writer.documents, "bytes": writer.nbytes}
    text = f"{out}: {writer.tokens:,} tokens of {len(files):,} file(s), {writer.nbytes / 1e6:.1f} MB"
    print(json.dumps(facts) if as_json else text)


def _files(paths: list[Path]) -> list[Path]:
    from foretoken.train.data import text_files

    if not (files := text_files(paths)):
        raise InvalidRequest("the folders hold no .py, .md or .txt file; name the files themselves")
    return files


def _batches(files: list[Path]) -> Iterator[list[str]]:
    """Yields pieces of whole lines, in batches of about ``PIECE`` characters."""
    batch: list[str] = []
    held = 0
    for file in files:
        try:
            with file.open(encoding="utf-8", errors="ignore") as handle:
                while lines := handle.readlines(PIECE):
                    batch.append("".join(lines))
                    held += len(batch[-1])
                    if held >= PIECE:
                        yield batch
                        batch, held = [], 0
        except OSError as error:
            raise InvalidRequest(f"cannot read {file}: {error.strerror}; leave it out, or make it readable") from error
    if batch:
        yield batch
