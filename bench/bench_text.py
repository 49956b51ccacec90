"""How fast is text tokenised beside the `tokenizers` library alone, and do datasets of any size take the same memory?

    python bench/bench_text.py                      # encoding, and datasets of 20 and 200 MB
    python bench/bench_text.py --megabytes 20 1000

The text is the standard library's source, over and over. Encoding: the best of some turns, taken in alternation, in CPU
seconds, so that it can be compared on a machine that is not idle; the mean of several objects of each, since even
two of the library, read from the same file, are up to a fifth apart. Datasets: each made by `dcnr dataset create` in a process of its
own, whose peak of memory is asked of the kernel: anonymous memory, without mapped files.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path

import tokenizers

from dcnr.text.preprocess import read_pieces, standard_library_files
from dcnr.text.tokenizer import Tokenizer, add_tokenizer, tokenizer_path

VOCABULARY = 32_000
TURNS = 5
INSTANCES = 3
PIECES = 16


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[20, 200], help="sizes of the datasets")
    sizes = parser.parse_args().megabytes
    with tempfile.TemporaryDirectory() as folder:
        data_dir = Path(folder)
        text = write_text(data_dir / "text.txt", 12)
        print(f"{os.cpu_count()} cores, {VOCABULARY} tokens")
        for kind in ("bpe", "char"):
            add_tokenizer(data_dir, kind, Tokenizer.train([text], kind, VOCABULARY))
        encoding(data_dir, text)
        print(f"\n{'dataset':>10} {'seconds':>9} {'MB/s':>8} {'MB per CPU s':>13} {'peak MB':>9}")
        for size in sizes:
            creation(data_dir, size)


def write_text(file: Path, megabytes: int) -> Path:
    """So much text."""
    left = megabytes * 1_000_000
    with file.open("wb") as out:
        while left > 0:
            for source in standard_library_files():
                data = source.read_bytes()
                out.write(data)
                left -= len(data)
                if left <= 0:
                    break
    return file


def encoding(data_dir: Path, text: Path) -> None:
    """Both encode the same pieces, as many at once."""
    pieces = list(islice(read_pieces(text), PIECES))
    size = sum(len(piece.encode()) for piece in pieces) / 1e6
    print(f"\n{'encoding':>10} {'library, MB per CPU s':>22} {'dcnr':>8} {'dcnr / library':>15}")
    for kind in ("bpe", "char"):
        path = tokenizer_path(data_dir, kind)
        works: list[Callable[[], object]] = []
        for _ in range(INSTANCES):  # in turns here too: the later one is read, the slower it is
            works.append(partial(encode_alone, tokenizers.Tokenizer.from_file(str(path)), pieces))
            works.append(partial(Tokenizer.load(path).encode_batch, pieces))
            works.append(partial(Tokenizer.load(path).encode_batch, pieces))
            works.append(partial(encode_alone, tokenizers.Tokenizer.from_file(str(path)), pieces))
        best = best_of(works)
        theirs, mine = (sum(best[first::4]) + sum(best[second::4]) for first, second in ((0, 3), (1, 2)))
        theirs, mine = theirs / (2 * INSTANCES), mine / (2 * INSTANCES)
        print(f"{kind:>10} {size / theirs:22.2f} {size / mine:8.2f} {theirs / mine:15.2f}", flush=True)


def encode_alone(library: tokenizers.Tokenizer, pieces: Sequence[str]) -> list[list[int]]:
    """As who uses the library would."""
    return [encoded.ids for encoded in library.encode_batch_fast(pieces, add_special_tokens=False)]


def best_of(works: Sequence[Callable[[], object]]) -> list[float]:
    """The least CPU time of each, over all its threads, in turns."""
    best = [float("inf")] * len(works)
    for _ in range(TURNS):
        for index, work in enumerate(works):
            started = time.process_time()
            work()
            best[index] = min(best[index], time.process_time() - started)
    return best


def creation(data_dir: Path, megabytes: int) -> None:
    """One dataset, and what it took."""
    text = write_text(data_dir / "much.txt", megabytes)
    command = [sys.executable, "-m", "dcnr.cli.main", "dataset", "create", f"of-{megabytes}", str(text), "--tokenizer", "bpe"]
    started, cpu, peak = time.perf_counter(), children_cpu(), 0
    with subprocess.Popen([*command, "--data-dir", str(data_dir)], stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            peak = max(peak, anonymous(process.pid))
            time.sleep(0.05)
    seconds, size = time.perf_counter() - started, text.stat().st_size / 1e6
    if process.returncode:
        raise SystemExit(process.returncode)
    print(f"{megabytes:7} MB {seconds:9.1f} {size / seconds:8.2f} {size / (children_cpu() - cpu):13.2f} {peak / 1e6:9.0f}", flush=True)
    text.unlink()


def children_cpu() -> float:
    """CPU seconds of the processes that were waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def anonymous(pid: int) -> int:
    """Bytes of memory of a process that no file stands behind; 0 if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")), 0)


if __name__ == "__main__":
    main()
