"""transformers' DebugUnderflowOverflow: stops at the first module with a value that is not finite.

It runs in the run's precision, and prints the module and the largest magnitudes of its weights, inputs and outputs.
Read like this: not finite in a weight: nonfinite-weights. Born in an output: at that module; while the model is finite
in fp32: fp16-overflow; from an attention module: fully-masked-rows; from the loss alone: no-valid-labels; else
corrupt-weights, as what makes sound inputs overflow in fp32's own range.
"""

from __future__ import annotations

import contextlib
import io
import math

import torch

from benchmarks.peers.material import Material, Saying

NAME = "transformers' overflow debugger"
NEEDS = "transformers"


def ask(material: Material) -> Saying:
    from transformers.debug_utils import DebugUnderflowOverflow

    measured = material.with_loss()
    printed = io.StringIO()
    with torch.no_grad():
        finite_in_fp32 = math.isfinite(measured(**material.inputs).item())
        with contextlib.redirect_stdout(printed), material.autocast():
            DebugUnderflowOverflow(measured, max_frames_to_save=1)
            try:
                measured(**material.inputs)
            except ValueError as error:
                if "DebugUnderflowOverflow" not in str(error):
                    raise
                return read(printed.getvalue(), finite_in_fp32)
    return Saying("nothing found")


def read(printed: str, finite_in_fp32: bool) -> Saying:
    """What the report of the frame that stopped it says; its lines are "abs min, abs max, what"."""
    lines = printed.strip().splitlines()
    bad = {line.split(" has ")[0].strip() for line in lines if line.endswith((" has nans", " has infs"))}
    frame = [line.split() for line in lines if line.startswith("   ")]
    name = next((words[0] for words in frame if len(words) == 2), "")
    module = name.removeprefix("model.")
    return Saying(
        f"not finite: {', '.join(sorted(bad))} of {name or 'the whole'}",
        frozenset({_cause(bad, module, finite_in_fp32)}),
        (module,),
        alarm=True,
    )


def _cause(bad: set[str], module: str, finite_in_fp32: bool) -> str:
    if any(not what.startswith(("input", "output")) for what in bad):
        return "nonfinite-weights"
    if finite_in_fp32:
        return "fp16-overflow"
    if "attn" in module or "attention" in module:
        return "fully-masked-rows"
    return "corrupt-weights" if module else "no-valid-labels"
