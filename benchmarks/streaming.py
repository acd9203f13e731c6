"""(d) Rows a second from streamed shards, against memory and whichever other loaders are installed.

All read the same two columns of the same rows in batches of 256: text is 50,000 rows of 512 int64 tokens and a label
(205 MB); images are 4,000 JPEGs of 96 x 96, decoded. Local disk, warm. mosaicml-streaming reads the very shards that
Cosmati wrote.
"""

from __future__ import annotations

import io
import resource
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmarks.measure import in_turns, write
from benchmarks.remote_peer import Stand
from cosmati.data.ingest import decode_image
from cosmati.data.loader import StreamingLoader
from cosmati.data.rows import RowBatch
from cosmati.data.shards.index import Column, FileInfo, ShardInfo, dump_index
from cosmati.data.shards.writer import ShardWriter
from cosmati.data.streaming import StreamingDataset

BATCH = 256
Pass = Callable[[], int]


class InMemory(Dataset[Any]):
    """Tensors, read a batch at a time: nothing can be faster."""

    def __init__(self, tokens: Tensor, labels: Tensor) -> None:
        self.tokens, self.labels = tokens, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        chosen = torch.tensor(indices)
        return self.tokens[chosen], self.labels[chosen]


def same(batch: Any) -> Any:  # noqa: ANN401  (a collate function)
    """Return the batch."""
    return batch


def write_text(folder: Path, num_rows: int) -> tuple[Tensor, Tensor]:
    """Write the text rows; return tokens and labels."""
    tokens = np.random.default_rng(0).integers(0, 50_000, (num_rows, 512))
    columns = {"tokens": "ndarray:int64:512", "label": "int"}
    with ShardWriter(folder, columns, class_path="unknown", source="bench") as writer:
        for number, row in enumerate(tokens):
            writer.write({"tokens": row, "label": number})
    return torch.from_numpy(tokens), torch.arange(num_rows)


def write_images(folder: Path, num_rows: int) -> list[bytes]:
    """Write the images; return their files."""
    from PIL import Image

    files, generator = [], np.random.default_rng(0)
    for _ in range(num_rows):
        # Smooth noise compresses about as a photograph does.
        small = Image.fromarray(generator.integers(0, 256, (12, 12, 3), dtype=np.uint8))
        stream = io.BytesIO()
        small.resize((96, 96), Image.Resampling.BICUBIC).save(stream, format="JPEG", quality=85)
        files.append(stream.getvalue())
    with ShardWriter(folder, {"image": "bytes", "label": "int"}, class_path="unknown", source="bench") as writer:
        for number, data in enumerate(files):
            writer.write({"image": data, "label": number % 10})
    return files


def decode(batch: RowBatch) -> Tensor:
    """Decode the images of a batch."""
    return torch.stack([decode_image(data) for data in batch.columns["image"]])


class ImagesInMemory(Dataset[Tensor]):
    """Files in memory, decoded when they're read."""

    def __init__(self, files: list[bytes]) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Tensor:
        return decode_image(self.files[index])


def counted(make: Callable[[], Iterator[Any]]) -> Pass:
    """Return a pass over a loader that counts rows."""

    def run() -> int:
        rows = 0
        for batch in make():
            first = batch.data if hasattr(batch, "data") and not isinstance(batch, Tensor) else batch
            while not isinstance(first, Tensor):
                first = next(iter(first.values())) if isinstance(first, dict) else first[0]
            rows += len(first)
        return rows

    return run


def ours(folder: Path, workers: int, *, shuffle: bool = True, **options: Any) -> Pass:  # noqa: ANN401
    """Return a pass over streamed rows."""
    data = StreamingDataset(folder, shuffle=shuffle, **options)
    loader = StreamingLoader(data, BATCH, num_workers=workers, persistent_workers=workers > 0)
    return counted(lambda: iter(loader))


def theirs(dataset: Any, workers: int, **options: Any) -> Pass:  # noqa: ANN401
    """Return a pass over any other data set."""
    loader = DataLoader(dataset, BATCH, num_workers=workers, persistent_workers=workers > 0, **options)
    return counted(lambda: iter(loader))


def peers(folder: Path, tokens: Tensor, labels: Tensor) -> dict[str, Pass]:
    """Return passes over the other loaders that are installed."""
    found: dict[str, Pass] = {}
    if find_spec("datasets") is not None:
        import datasets  # before the stand-ins below, in which it would find torchvision

        table = datasets.Dataset.from_dict({"tokens": tokens.numpy(), "label": labels.numpy()})
        arrow = folder.parent / "arrow"
        table.save_to_disk(str(arrow))
        data = datasets.load_from_disk(str(arrow)).with_format("torch")
        for workers in (0, 2):
            found[f"datasets (Arrow), shuffled, {workers} workers"] = theirs(data, workers, shuffle=True)
    if find_spec("litdata") is not None:
        import litdata

        np.save(folder.parent / "tokens.npy", tokens.numpy())
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            litdata.optimize(
                partial(lit_row, folder.parent / "tokens.npy"),
                list(range(len(labels))),
                str(folder.parent / "lit"),
                num_workers=1,
                chunk_bytes="64MB",
                start_method="fork",  # the default changes that of the whole process
            )
        for workers in (0, 2):
            data = litdata.StreamingDataset(str(folder.parent / "lit"), shuffle=True)
            loader = litdata.StreamingDataLoader(
                data, batch_size=BATCH, num_workers=workers, persistent_workers=workers > 0
            )
            found[f"litdata, shuffled, {workers} workers"] = counted(partial(iter, loader))
    if find_spec("streaming") is not None:
        sys.meta_path.append(Stand())  # type: ignore[arg-type]
        from streaming import StreamingDataset as Mosaic

        for workers in (0, 2):
            # A directory of its own for each: its shared memory is named by it.
            own = folder.parent / f"mosaic-{workers}"
            own.mkdir()
            for path in folder.iterdir():
                (own / path.name).symlink_to(path)
            text = (own / "index.json").read_text()
            (own / "index.json").unlink()
            (own / "index.json").write_text(text)
            data = Mosaic(local=str(own), shuffle=True, batch_size=BATCH, allow_unsafe_types=False)
            found[f"mosaicml-streaming, shuffled, {workers} workers"] = theirs(data, workers)
    found |= web_dataset(folder.parent / "tar", tokens, labels) if find_spec("webdataset") is not None else {}
    found |= (
        grain_dataset(folder.parent / "rows.array_record", tokens, labels) if find_spec("grain") is not None else {}
    )
    return found


def web_dataset(folder: Path, tokens: Tensor, labels: Tensor) -> dict[str, Pass]:
    """Return passes over WebDataset's tar files, shuffled within 1,000 rows."""
    import webdataset

    folder.mkdir()
    with webdataset.ShardWriter(str(folder / "%05d.tar"), maxsize=1 << 26, verbose=0) as writer:
        for number in range(len(labels)):
            row = {"tokens.bin": tokens[number].numpy().tobytes(), "label.bin": labels[number].numpy().tobytes()}
            writer.write({"__key__": f"{number:07d}", **row})
    urls = sorted(map(str, folder.glob("*.tar")))
    found = {}
    for workers in (0, 2):
        data = webdataset.WebDataset(urls, shardshuffle=len(urls), seed=0, empty_check=False)
        rows = data.shuffle(1000).map(from_bytes).batched(BATCH)
        loader = webdataset.WebLoader(rows, batch_size=None, num_workers=workers, persistent_workers=workers > 0)
        found[f"webdataset, shuffled within 1,000, {workers} workers"] = counted(partial(iter, loader))
    return found


def from_bytes(row: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return a row of WebDataset's as tensors."""
    tokens, label = (np.frombuffer(bytearray(row[name]), np.int64) for name in ("tokens.bin", "label.bin"))
    return torch.from_numpy(tokens), torch.from_numpy(label)[0]


def grain_dataset(path: Path, tokens: Tensor, labels: Tensor) -> dict[str, Pass]:
    """Return passes over Grain's ArrayRecord files."""
    import grain
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(str(path), "group_size:1")
    for number in range(len(labels)):
        writer.write(labels[number].numpy().tobytes() + tokens[number].numpy().tobytes())
    writer.close()
    found = {}
    for workers in (0, 2):
        rows = grain.MapDataset.source(grain.sources.ArrayRecordDataSource([str(path)]))
        batches = rows.shuffle(seed=0).map(from_record).batch(BATCH).to_iter_dataset()
        if workers:
            batches = batches.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers))
        found[f"grain (ArrayRecord), shuffled, {workers} workers"] = counted(partial(as_tensors, batches))
    return found


def from_record(record: bytes) -> dict[str, Any]:
    """Return a row of an ArrayRecord."""
    values = np.frombuffer(record, np.int64)
    return {"tokens": values[1:], "label": values[0]}


def as_tensors(batches: Any) -> Iterator[dict[str, Tensor]]:  # noqa: ANN401
    """Return batches of arrays as tensors, without a copy."""
    return ({name: torch.from_numpy(value) for name, value in batch.items()} for batch in batches)


def lit_row(path: Path, number: int) -> dict[str, Any]:
    """Return a row, for litdata's own writer."""
    return {"tokens": np.load(path, mmap_mode="r")[number].copy(), "label": number}


def timed(run: Pass) -> Callable[[], float]:
    """Return seconds a row of one pass."""

    def seconds() -> float:
        start = perf_counter()
        rows = run()
        return (perf_counter() - start) / rows

    return seconds


def start_up(num_shards: int) -> str:
    """Open a source of many shards, and say what it took."""
    columns = (Column("tokens", "ndarray:int64:512", 4096), Column("tag", "str", None))
    digest = "ab" * 32
    shards = [
        ShardInfo(
            4000,
            columns,
            FileInfo(f"shard.{n:06d}.mds", 16_500_000, {"sha256": digest}),
            FileInfo(f"shard.{n:06d}.mds.zstd", 9_000_000, {"sha256": digest}),
            "zstd:3",
            1 << 26,
        )
        for n in range(num_shards)
    ]
    script = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from cosmati.data.streaming import StreamingDataset\n"
        "def peak(): return int(Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0])\n"
        "Path('/proc/self/clear_refs').write_text('5')  # the peak starts from here\n"
        "before = peak()\n"
        "start = time.perf_counter()\n"
        "data = StreamingDataset(sys.argv[1])\n"
        "data.locate(range(256))\n"
        "took = time.perf_counter() - start\n"
        "more = peak() - before\n"
        "print(f'{len(data.sources[0].index.shard_rows):,} shards, {len(data):,} rows: {took:.2f} s to the first '\n"
        "      f'order, {more / 1e3:.0f} MB more at peak')\n"
    )
    import subprocess

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "index.json").write_bytes(dump_index(shards, {}))
        done = subprocess.run([sys.executable, "-c", script, folder], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def memory_over_epochs(run: Pass, epochs: int) -> str:
    """Say how much the peak memory grows over epochs."""
    run()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(epochs):
        run()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e3
    return f"peak memory grew by {grown:.1f} MB over {epochs} more epochs"


def run(*, quick: bool) -> str:
    """Run the benchmark, write its results and return the tables."""
    torch.set_num_threads(1)
    num_rows, num_images, rounds = (4_000, 300, 2) if quick else (50_000, 4_000, 7)
    suffix = "_quick" if quick else ""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokens, labels = write_text(folder / "text", num_rows)
        memory = InMemory(tokens, labels)
        arms: dict[str, Pass] = {}
        for workers in (2, 0, 4):
            arms[f"in memory, shuffled, {workers} workers"] = theirs(memory, workers, shuffle=True, collate_fn=same)
            arms[f"cosmati, shuffled, {workers} workers"] = ours(folder / "text", workers, columns=("tokens", "label"))
        arms["in memory again (A/A), shuffled, 2 workers"] = theirs(memory, 2, shuffle=True, collate_fn=same)
        arms["cosmati, sequential, 2 workers"] = ours(folder / "text", 2, shuffle=False, columns=("tokens", "label"))
        arms |= peers(folder / "text", tokens, labels)
        rows = in_turns({arm: timed(one) for arm, one in arms.items()}, rounds)
        notes = {
            "what": "a step is a row here; batches of 256; 512 int64 tokens and a label",
            "start": start_up(1_000 if quick else 100_000),
            "memory": memory_over_epochs(arms["cosmati, shuffled, 0 workers"], 3 if quick else 10),
        }
        text = write(f"streaming_text{suffix}", rows, notes)
        files = write_images(folder / "images", num_images)
        images: dict[str, Pass] = {}
        for workers in (2, 0, 4):
            images[f"in memory, shuffled, {workers} workers"] = theirs(ImagesInMemory(files), workers, shuffle=True)
            images[f"cosmati, shuffled, {workers} workers"] = ours(folder / "images", workers, transform=decode)
        images["cosmati, sequential, 2 workers"] = ours(folder / "images", 2, shuffle=False, transform=decode)
        rows = in_turns({arm: timed(one) for arm, one in images.items()}, 2 if quick else 5)
        notes = {"what": "a step is an image here: a JPEG of 96 x 96, decoded; batches of 256"}
        text += "\n" + write(f"streaming_images{suffix}", rows, notes)
        with suppress(Exception):
            from streaming.base.util import clean_stale_shared_memory

            clean_stale_shared_memory()
    return text
