"""SmolLM2-135M: healthy in 8 bits and more; planted losses of precision are found where they are made.

OMP_NUM_THREADS=2 python -m pytest -m real_model tests/acceptance/test_real_precision.py    # minutes on two cores
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fixtures.smollm2 import smollm2_folder
from stability_probe.batches.base import IGNORED, Batch
from stability_probe.checkpoints import read_checkpoint
from stability_probe.compare.result import PrecisionResult
from stability_probe.compare.session import compare_precisions
from stability_probe.models import load_model
from stability_probe.replay import Subject
from tests.test_compare_planted import BF16Norm, BF16Rotary, Faint, half_softmax, truncated

pytestmark = pytest.mark.real_model
__all__ = ["half_softmax"]  # a fixture, used by name

LENGTH = 320  # angles in bf16 are wrong from position 256 on


@pytest.fixture
def model() -> Any:
    return load_model(read_checkpoint(smollm2_folder())).module


@pytest.fixture(scope="module")
def batch() -> Batch:
    from pydoc_data import topics

    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(smollm2_folder() / "tokenizer.json"))
    ids = torch.tensor([tokenizer.encode(topics.topics["class"], add_special_tokens=False).ids[:LENGTH]])
    return Batch(ids, torch.cat([ids[:, 1:], torch.full((1, 1), IGNORED)], 1))


def compare(model: nn.Module, batch: Batch, *precisions: str, **options: Any) -> dict[str, PrecisionResult]:
    return compare_precisions(Subject.of(model), batch, precisions, **options).precisions


def test_a_healthy_model_is_healthy_in_8_bits_and_more(model: Any, batch: Batch) -> None:
    for name, result in compare(model, batch, "bf16", "fp16", "fp8", "mxfp8").items():
        assert result.severity == 0 and result.culprits == (), f"{name}: {result.sentence}"


def test_one_norm_in_bf16(model: Any, batch: Batch) -> None:
    model.model.layers[12].post_attention_layernorm = BF16Norm(model.model.layers[12].post_attention_layernorm)
    assert compare(model, batch, "bf16")["bf16"].culprits == ("model.layers.12.post_attention_layernorm",)


def test_rotary_angles_in_bf16(model: Any, batch: Batch) -> None:
    model.model.rotary_emb = BF16Rotary(model.model.rotary_emb.inv_freq)
    assert compare(model, batch, "bf16")["bf16"].culprits == ("model.rotary_emb",)


def test_a_softmax_in_fp16_near_its_limit(model: Any, batch: Batch, half_softmax: str) -> None:
    attention = model.model.layers[1].self_attn
    with torch.no_grad():
        attention.q_proj.weight *= 60
        attention.k_proj.weight *= 50
    model.set_attn_implementation(half_softmax)
    found = compare_precisions(Subject.of(model), batch, ["bf16"])
    assert found.max_attention_logit < 65_504
    assert found.precisions["bf16"].culprits[0] == "model.layers.1.self_attn"


def test_queries_and_keys_times_30(model: Any, batch: Batch) -> None:
    attention = model.model.layers[17].self_attn
    with torch.no_grad():
        attention.q_proj.weight *= 30
        attention.k_proj.weight *= 30
    assert compare(model, batch, "bf16")["bf16"].culprits == ("model.layers.17.self_attn",)


def test_gradients_that_underflow_without_loss_scaling(model: Any, batch: Batch) -> None:
    model.lm_head = Faint(model.lm_head)
    lost, kept = compare(model, batch, "fp16", "fp16:scale=16777216").values()
    assert lost.severity == 2 and "underflows to zero" in lost.sentence
    assert kept.grad_relative_error < 0.3 and lost.grad_relative_error > 0.9


def test_a_residual_branch_rounded_toward_zero_is_a_bias(model: Any, batch: Batch) -> None:
    layer = model.model.layers[9]

    def forward(hidden_states: Tensor, **options: Any) -> Tensor:
        added = hidden_states + layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **options)[0]
        x = truncated(added) if torch.is_autocast_enabled("cpu") else added
        return x + layer.mlp(layer.post_attention_layernorm(x))

    layer.forward = forward
    result = compare(model, batch, "bf16")["bf16"]
    assert result.culprits == ("model.layers.9",) and "toward zero" in result.sentence
