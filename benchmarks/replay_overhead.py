"""What measuring costs: the instrumented fp32 replay against the bare forward and backward.

Both run in turn in one process, on SmolLM2-135M with 4 rows of 512 tokens, and the ratio of their medians is
printed. One thread by default: matrix products gain from more of them, the many small operations of the taps do
not, so the ratio grows with threads (`--threads 2`: about 0.1 more) and on a machine whose memory others use.
Peak memory is the highest resident set (VmHWM, Linux) of a fresh process that does only one of the two, counted
from after the checkpoint was read: reading takes more than either.

    python benchmarks/replay_overhead.py [--rounds 3]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fixtures.smollm2 import smollm2_folder
from stability_probe.batches.base import IGNORED, Batch
from stability_probe.checkpoints import read_checkpoint
from stability_probe.models import load_model
from stability_probe.replay import Subject, replay

ROWS, POSITIONS = 4, 512


def batch(vocabulary: int) -> Batch:
    """English text where a tokenizer is at hand would do as well: the cost does not depend on the ids."""
    ids = torch.randint(0, vocabulary, (ROWS, POSITIONS), generator=torch.Generator().manual_seed(0))
    targets = torch.full_like(ids, IGNORED)
    targets[:, :-1] = ids[:, 1:]
    return Batch(ids, targets)


def bare(module: nn.Module, what: Batch) -> float:
    """What a training loop does with one row at a time: no hooks, gradients kept in `.grad`."""
    started = time.perf_counter()
    valid = int((what.targets_BT != IGNORED).sum())
    for row in range(ROWS):
        logits = module(what.ids_BT[row : row + 1], use_cache=False).logits.float()
        loss = F.cross_entropy(logits[0], what.targets_BT[row], reduction="sum", ignore_index=IGNORED)
        (loss / valid).backward()
    seconds = time.perf_counter() - started
    for parameter in module.parameters():
        parameter.grad = None
    return seconds


def instrumented(subject: Subject, what: Batch) -> float:
    """Every tap and every sketch, as `probe replay` runs it."""
    return replay(subject, what, sketches=True).seconds


def peak_mib(kind: str) -> float:
    """Highest resident set of a process of its own, MiB."""
    out = subprocess.run([sys.executable, __file__, "--only", kind], check=True, capture_output=True, text=True)
    return json.loads(out.stdout.splitlines()[-1])["peak_mib"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", choices=("bare", "instrumented"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    module = load_model(read_checkpoint(smollm2_folder())).module
    subject, what = Subject.of(module), batch(49_152)
    if options.only:
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        bare(module, what) if options.only == "bare" else instrumented(subject, what)
        peak = Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]
        print(json.dumps({"peak_mib": int(peak) / 1024}))
        return
    bare(module, what)  # warms the caches and the allocator
    times = [(bare(module, what), instrumented(subject, what)) for _ in range(options.rounds)]
    plain, tapped = (statistics.median(column) for column in zip(*times, strict=True))
    print(f"bare {plain:.2f} s, instrumented {tapped:.2f} s, ratio {tapped / plain:.3f} (median of {options.rounds})")
    memory = {kind: peak_mib(kind) for kind in ("bare", "instrumented")}
    print(
        f"peak memory: bare {memory['bare']:.0f} MiB, instrumented {memory['instrumented']:.0f} MiB, "
        f"ratio {memory['instrumented'] / memory['bare']:.3f}"
    )


if __name__ == "__main__":
    main()
