"""Speed and memory of the token audit, each against the published score's loop in the same run.

    python -m benchmarks.audit_speed                 # ratios, scaling with T, a training step, memory
    python -m benchmarks.audit_speed --dataset       # 50 M tokens of .npy shards really run, a billion estimated

One core (OMP_NUM_THREADS=1). Jobs take turns, the fastest of several runs counts, and what is counted is processor
time, so that other work on the machine does not. The rows are real text and code (fixtures/audit_text.py), T = 4096.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np

from fixtures.audit_corpus import Corpus
from fixtures.audit_text import VOCABULARY
from fixtures.tiny_text import EOS_ID
from stability_probe.audit.rows import audit_rows

LENGTH = 4096


def text_rows(rows: int, length: int = LENGTH) -> np.ndarray:
    corpus = Corpus("choose", length)
    stream = np.concatenate([corpus.stream(kind) for kind in ("en", "python", "c")])
    return np.resize(stream, rows * length).reshape(rows, length).astype(np.int32)


def published_plain(ids: np.ndarray) -> list[float]:
    """The published loop with plain counters and math.log2."""
    from math import log2

    scores = []
    for tokens in ids.tolist():
        grams = [tuple(tokens[i : i + 4]) for i in range(len(tokens) - 4)]
        repeated = sum(v - 1 for v in Counter(grams).values() if v > 1) / len(grams)
        entropy = -sum(c / len(tokens) * log2(c / len(tokens)) for c in Counter(tokens).values())
        scores.append(0.5 * repeated + 0.5 * max(0.0, 1.0 - entropy / 8.0))
    return scores


def published_torch(ids: np.ndarray) -> list[float]:
    """The same with a torch scalar per distinct token, as published."""
    import torch

    scores = []
    for tokens in torch.from_numpy(ids).tolist():
        grams = [tuple(tokens[i : i + 4]) for i in range(len(tokens) - 4)]
        repeated = sum(v - 1 for v in Counter(grams).values() if v > 1) / len(grams)
        shares = [c / len(tokens) for c in Counter(tokens).values()]
        entropy = -sum(share * torch.log2(torch.tensor(share)).item() for share in shares)
        scores.append(0.5 * repeated + 0.5 * max(0.0, 1.0 - entropy / 8.0))
    return scores


def fastest(jobs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Seconds of the fastest run of each job, the jobs taking turns."""
    best = dict.fromkeys(jobs, float("inf"))
    for _ in range(rounds):
        for name, job in jobs.items():
            began = time.process_time()
            job()
            best[name] = min(best[name], time.process_time() - began)
    return best


def audit(ids: np.ndarray) -> object:
    return audit_rows(ids, vocab_size=VOCABULARY, eos_id=EOS_ID)


def ratios() -> None:
    ids = text_rows(64)
    few = ids[:8]
    jobs: dict[str, Callable[[], object]] = {
        "audit, all detectors but the round trip": lambda: audit(ids),
        "published, plain counters": lambda: published_plain(few),
        "published, torch scalars": lambda: published_torch(few),
    }
    sizes = dict(zip(jobs, (ids.size, few.size, few.size), strict=True))
    best = fastest(jobs, 30)
    rates = {name: sizes[name] / best[name] / 1e6 for name in jobs}
    ours = rates["audit, all detectors but the round trip"]
    print(f"\n### T = {LENGTH}, one core\n\n| | M tokens/s | audit is |\n| --- | ---: | ---: |")
    for name, rate in rates.items():
        print(f"| {name} | {rate:.2f} | {ours / rate:.1f}x |")


def scaling() -> None:
    print("\n### Cost per token by row length\n\n| T | ns a token | ns a token / log2 T |\n| ---: | ---: | ---: |")
    for length in (256, 1024, 4096, 16384, 65536, 262144, 1048576):
        ids = text_rows(max(1, 262144 // length), length)
        seconds = fastest({"audit": lambda ids=ids: audit(ids)}, 7)["audit"]
        per_token = seconds / ids.size * 1e9
        print(f"| {length} | {per_token:.1f} | {per_token / np.log2(length):.2f} |")


def training_step() -> None:
    """32 × 2 048 tokens beside a model of 100 M parameters: one row of the step is run, the step is 32 of them."""
    import torch

    from stability_probe import audit_batch

    torch.manual_seed(0)
    width, layers = 768, 12
    block = torch.nn.TransformerEncoderLayer(width, 12, 4 * width, batch_first=True, norm_first=True)
    model = torch.nn.Sequential(
        torch.nn.Embedding(VOCABULARY, width),
        torch.nn.TransformerEncoder(block, layers, enable_nested_tensor=False),
        torch.nn.Linear(width, VOCABULARY),
    )
    parameters = sum(p.numel() for p in model.parameters())
    batch = torch.from_numpy(text_rows(32, 2048)).long()
    labels = torch.roll(batch, -1, 1)
    audit_seconds = fastest({"audit": lambda: audit_batch(batch, labels, vocab_size=VOCABULARY)}, 15)["audit"]
    began = time.perf_counter()
    logits = model(batch[:1])
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:1].flatten()).backward()
    step_seconds = 32 * (time.perf_counter() - began)
    flops = 6 * parameters * batch.numel()
    print(f"\n### In a training loop: 32 × 2 048 tokens, {parameters / 1e6:.0f} M parameters\n")
    print(
        f"audit {audit_seconds * 1e3:.1f} ms; step on this CPU {step_seconds:.0f} s (one row run, times 32): ", end=""
    )
    print(f"{audit_seconds / step_seconds:.4%} of a step")
    print(f"on an accelerator at 150 TFLOP/s the step is {flops / 150e12 * 1e3:.0f} ms: ", end="")
    print(f"{audit_seconds / (flops / 150e12):.2%} of it where the audit waits, nothing where it overlaps")


_MEMORY = """
import resource
import sys
from pathlib import Path
import numpy as np
from stability_probe.audit.blocks import Settings
from stability_probe.audit.dataset import audit_dataset
folder = Path(sys.argv[1])
shards = sorted(folder.glob("*.npy"))
found = audit_dataset(shards, Settings(2048, 16384, 0), folder / "flagged.csv", workers=int(sys.argv[2]))
# Not ru_maxrss: it starts from what the process that started this one had.
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
own = int(status["VmHWM"].split()[0]) / 1024
children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
print(found.rows, found.tokens, found.flagged, f"{own:.0f} {children:.0f}")
"""


def dataset(million_tokens: int, workers: int) -> None:
    """Shards of 10 M tokens each; memory is that of the process itself and of the largest worker."""
    with tempfile.TemporaryDirectory() as folder:
        corpus = Corpus("choose", LENGTH)
        stream = np.concatenate([corpus.stream(kind) for kind in ("en", "python", "c")]).astype(np.uint16)
        for shard in range(million_tokens // 10):
            np.save(Path(folder) / f"{shard:03d}.npy", np.resize(np.roll(stream, 777 * shard), 10_000_000))
        began = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", _MEMORY, folder, str(workers)], check=True, capture_output=True, text=True
        )
        seconds = time.perf_counter() - began
    rows, tokens, flagged, own, children = done.stdout.split()
    print(f"\n### A data set of .npy shards, {workers} worker processes\n")
    print(f"{int(tokens) / 1e6:.0f} M tokens, {rows} rows, {flagged} flagged, {seconds:.1f} s")
    print(f"{int(tokens) / seconds / 1e6:.1f} M tokens/s; a billion tokens: {1e9 / int(tokens) * seconds / 60:.1f} min")
    print(f"peak memory: main process {own} MB, largest worker {children} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", action="store_true")
    parser.add_argument("--million-tokens", type=int, default=50)
    options = parser.parse_args()
    if options.dataset:
        for workers in dict.fromkeys((1, len(os.sched_getaffinity(0)))):
            dataset(options.million_tokens, workers)
        return
    ratios()
    scaling()
    training_step()
    print(f"\nlargest memory of this benchmark {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB")


if __name__ == "__main__":
    main()
