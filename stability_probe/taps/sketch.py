"""Linear sketches: short vectors that keep norms, differences and inner products of long ones.

A gradient or an activation is too large to keep for a later comparison. Its sketch (signed sums of its
elements, Charikar et al. 2002, "Finding frequent items in data streams") has WIDTH numbers, is linear, and
‖sketch(x) − sketch(y)‖ estimates ‖x − y‖ with a relative standard error near 1/√(2·WIDTH) = 1.1 %.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

# Prime, so that the stride of a channel never divides it: a hot channel spreads over all cells.
WIDTH = 4093


@functools.lru_cache(maxsize=4096)
def _signs(length: int, seed: int, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(0x5EED + 7919 * seed + length)
    return (torch.randint(0, 2, (length,), generator=generator, dtype=torch.int8) * 2 - 1).to(device, torch.float32)


def _in_fp32(device: str) -> AbstractContextManager[Any]:
    """A replay in bf16 is measured in fp32; where nothing is cast there is nothing to switch off."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


@torch.no_grad()
def sketch(values: Tensor, seed: int = 0) -> Tensor:
    """(WIDTH,) fp32 sketch of a tensor of any shape.

    Tensors that are to be compared must be sketched with the same seed; different seeds make sketches
    whose sum is the sketch of the concatenation.
    """
    flat = values.detach().reshape(-1)
    whole = flat.numel() // WIDTH
    signs = _signs(whole + 1, seed, str(flat.device))
    with _in_fp32(flat.device.type):
        result = signs[:whole] @ flat[: whole * WIDTH].view(whole, WIDTH).float()
    if rest := flat.numel() - whole * WIDTH:
        result[:rest] += signs[whole] * flat[whole * WIDTH :].float()
    # Tensors of different seeds meet in one sketch: their cells are turned and signed apart from each other.
    return (result * _signs(WIDTH, seed, str(flat.device))).roll(seed * 1009)
