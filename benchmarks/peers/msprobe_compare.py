"""msprobe (MindStudio-Probe): dumps of every module in fp32 and in the run's precision, and its comparison of the two.

A module counts as flagged where the comparison has anything against it but the dtype, which differs by design. The
first flagged one is the place; read as bf16-precision-loss, or fp16-overflow where the run is in fp16.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.peers.material import Material, Saying

NAME = "msprobe's comparison"
NEEDS = "msprobe"
STEPS = itertools.count()


@functools.cache
def _debugger() -> tuple[Any, Path]:
    """msprobe keeps one debugger per process; each dump is one of its steps."""
    from msprobe.pytorch import PrecisionDebugger

    folder = Path(tempfile.mkdtemp(prefix="msprobe-"))
    what = {"scope": [], "list": [], "data_mode": ["all"]}
    settings = {"task": "tensor", "level": "L0", "dump_path": str(folder), "rank": [], "step": [], "tensor": what}
    (folder / "config.json").write_text(json.dumps(settings))
    return PrecisionDebugger(config_path=str(folder / "config.json")), folder


def ask(material: Material) -> Saying:
    reference = dump(material, contextlib.nullcontext())
    table = compared(dump(material, material.autocast()), reference)
    modules = len(set(table["NPU Name"].map(module_of)))
    bad = flagged(table)
    if not bad:
        return Saying(f"0 of {modules} modules flagged")
    cause = "fp16-overflow" if material.loaded.run_precision.startswith("fp16") else "bf16-precision-loss"
    return Saying(f"{len(bad)} of {modules} modules flagged, {bad[0]} first", frozenset({cause}), (bad[0],), alarm=True)


def dump(material: Material, precision: Any) -> Path:
    """The file that lists the values of every module in one forward and backward."""
    debugger, folder = _debugger()
    module = material.module
    module.zero_grad(set_to_none=True)
    with precision:
        debugger.start(model=module)
        loss = material.with_loss()(**material.inputs)
    loss.backward()
    debugger.stop()
    debugger.step()
    module.zero_grad(set_to_none=True)
    return next((folder / f"step{next(STEPS)}").glob("*/dump.json"))


def compared(low: Path, reference: Path) -> pd.DataFrame:
    from msprobe.pytorch.compare.pt_compare import pt_compare

    with tempfile.TemporaryDirectory() as out:
        pt_compare({"npu_path": str(low), "bench_path": str(reference), "is_print_compare_log": False}, out)
        return pd.read_csv(next(Path(out).glob("*.csv")))


def flagged(table: pd.DataFrame) -> list[str]:
    """Modules in the order of execution, without those that only have another dtype."""
    bad = table[table["Result"].isin(["error", "warning"]) & table["Err_message"].map(_of_values)]
    return list(dict.fromkeys(bad["NPU Name"].map(module_of)))


def _of_values(told: object) -> bool:
    return isinstance(told, str) and any("dtype" not in message for message in json.loads(told))


def module_of(name: str) -> str:
    """ "Module.model.layers.0.mlp.MLP.forward.0.output.0" is of model.layers.0.mlp."""
    parts = name.split(".")
    kinds = ("forward", "backward", "parameters_grad")
    way = next((at for at, part in enumerate(parts) if part in kinds), len(parts))
    return ".".join(parts[1 : way - 1])
