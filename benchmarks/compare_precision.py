"""Time and memory of `compare-precision` beside the bare fp32 replay, on SmolLM2-135M.

    python benchmarks/compare_precision.py [--rows 4] [--positions 512] [--precision bf16] [--repeats 3]

Each side runs in a process of its own for the peak memory, and alternately in one process for the time. Time is
processor time as well as wall time: on a machine that others use too, only the first can be compared.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


def setting(rows: int, positions: int):  # type: ignore[no-untyped-def]
    """The subject, and a batch of this repository's own text."""
    import torch

    from fixtures.smollm2 import smollm2_folder
    from stability_probe.batches.base import IGNORED, Batch
    from stability_probe.checkpoints import read_checkpoint
    from stability_probe.incident import load_tokenizer
    from stability_probe.models import load_model
    from stability_probe.replay import Subject

    folder = smollm2_folder()
    tokenizer, _ = load_tokenizer(None, folder)
    texts = sorted((ROOT / "stability_probe").rglob("*.py"))
    ids = torch.tensor(tokenizer.encode("\n".join(path.read_text() for path in texts)).ids[: rows * positions])
    ids = ids.reshape(rows, positions)
    targets = torch.cat([ids[:, 1:], torch.full((rows, 1), IGNORED)], 1)
    return Subject.of(load_model(read_checkpoint(folder)).module), Batch(ids, targets)


def bare(subject, batch, precision: str):  # type: ignore[no-untyped-def]
    """One fp32 forward and backward, as many rows at a time as the other side takes; only gradients are measured."""
    from stability_probe.compare.session import rows_together
    from stability_probe.replay import replay

    return replay(subject, batch, detail=False, microbatch=rows_together(batch))


def compare(subject, batch, precision: str):  # type: ignore[no-untyped-def]
    from stability_probe.compare.session import compare_precisions

    return compare_precisions(subject, batch, [precision])


SIDES: dict[str, Callable] = {"bare": bare, "compare": compare}


# glibc then gives back what is freed at once: the peak is that of live memory, without the holes of its heap.
NO_HOLES = {"MALLOC_MMAP_THRESHOLD_": "1048576", "MALLOC_TRIM_THRESHOLD_": "1048576"}


def peak_mib(side: str, options: argparse.Namespace, allocator: dict[str, str]) -> int:
    """Peak resident memory of one side, alone in a process."""
    arguments = [f"--rows={options.rows}", f"--positions={options.positions}", f"--precision={options.precision}"]
    command = [sys.executable, __file__, "--peak-of", side, *arguments]
    environment = {**os.environ, **allocator}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return int(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--positions", type=int, default=512)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peak-of", choices=list(SIDES))
    options = parser.parse_args()
    if options.peak_of:
        SIDES[options.peak_of](*setting(options.rows, options.positions), options.precision)
        # VmHWM and not ru_maxrss: the latter begins with what the parent process had when it forked.
        status = Path("/proc/self/status").read_text()
        print(int(status.split("VmHWM:")[1].split()[0]) // 1024)
        return
    subject, batch = setting(options.rows, options.positions)
    bare(subject, batch, options.precision)  # the first run reads the weights from disk
    seconds: dict[str, list[tuple[float, float]]] = {side: [] for side in SIDES}
    for _ in range(options.repeats):
        for side, run in SIDES.items():
            wall, processor = time.perf_counter(), time.process_time()
            found = run(subject, batch, options.precision)
            seconds[side].append((time.process_time() - processor, time.perf_counter() - wall))
            print(f"{side:8s} processor {seconds[side][-1][0]:6.1f} s   wall {seconds[side][-1][1]:6.1f} s", flush=True)
    for index, kind in enumerate(("processor", "wall")):
        ratio = [c[index] / b[index] for b, c in zip(seconds["bare"], seconds["compare"], strict=True)]
        print(f"time, {kind}: {statistics.median(ratio):.2f} times one bare fp32 forward and backward (median)")
    for what, allocator in (("live memory", NO_HOLES), ("resident memory, holes of the heap included", {})):
        peaks = {side: peak_mib(side, options, allocator) for side in SIDES}
        print(f"peak {what}: {peaks['compare']} / {peaks['bare']} MiB = {peaks['compare'] / peaks['bare']:.2f}")
    result = found.precisions[options.precision]
    print(found.summary)
    ratios = sorted((m.excess, m.module) for m in result.modules if m.layer >= 0 and m.introduced_error > 1e-4)
    print(f"largest introduced error over siblings: {ratios[-1][0]:.2f} ({ratios[-1][1]})")
    grads = sorted(m.grad_introduced_error for m in result.modules if m.grad_introduced_error > 0)
    print(f"gradients of blocks, introduced: median {statistics.median(grads):.2%}, worst {grads[-1]:.2%}")
    print(f"bias away from zero: at most {max(abs(m.bias) for m in result.modules):.2f}")
    errors = sorted((m.relative_error, m.module) for m in result.modules)
    middle = statistics.median(error for error, _ in errors)
    print(f"module error: median {middle:.2%}, worst {errors[-1][0]:.2%} ({errors[-1][1]})")


if __name__ == "__main__":
    main()
