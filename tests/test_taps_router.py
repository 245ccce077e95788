"""Routers are found and counted in the mixture models of transformers."""

import copy
import math

import pytest
import torch

from fixtures.lagged_language import GPT_OSS, MIXTRAL, sequences
from stability_probe.replay import Subject
from stability_probe.taps.router import RouterTap, find_routers

QWEN = {
    **MIXTRAL, "model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
DEEPSEEK = {
    **MIXTRAL, "model_type": "deepseek_v3", "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 24, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "n_shared_experts": 1,
}  # fmt: skip
for config in (QWEN, DEEPSEEK):
    del config["num_local_experts"]
del DEEPSEEK["head_dim"]
# layers with a router, experts, experts per token, and where the chosen experts stand in the router's output
FAMILIES = {
    "mixtral": (MIXTRAL, 2, 4, 1, 2),
    "gpt_oss": (GPT_OSS, 2, 4, 1, 2),
    "qwen3_moe": (QWEN, 2, 6, 2, 2),
    "deepseek_v3": (DEEPSEEK, 1, 8, 2, None),
}


def build(config):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**copy.deepcopy(config)), attn_implementation="eager"
    ).eval()
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


@pytest.mark.parametrize("name", FAMILIES)
def test_every_router_is_found_and_its_choices_are_counted(name):
    config, layers, experts, top_k, place = FAMILIES[name]
    model = build(config)
    sites = find_routers(model, Subject.of(model).anatomy)
    assert [(site.experts, site.top_k) for site in sites] == [(experts, top_k)] * layers
    tap, chosen = RouterTap(sites), []
    router = model.get_submodule(sites[-1].name)
    handle = router.register_forward_hook(lambda _m, _i, out: chosen.append(out))
    with tap.on(model), torch.no_grad():
        model(sequences(2))
    handle.remove()
    record = tap.table()[-1]
    assert record["tokens"] == 128
    assert 0.0 <= record["load_entropy"] <= math.log(experts) + 1e-9
    if place is not None:
        counts = torch.bincount(chosen[0][place].flatten(), minlength=experts).double()
        assert record["load_top"] == pytest.approx((counts / counts.sum()).max().item())


def test_sigmoid_routers_choose_with_their_correction():
    model = build(DEEPSEEK)
    (site,) = find_routers(model, Subject.of(model).anatomy)
    assert site.sigmoid and site.correction == "e_score_correction_bias"
    model.get_submodule(site.name).e_score_correction_bias[3] = 9.0
    tap = RouterTap((site,))
    with tap.on(model), torch.no_grad():
        model(sequences(2))
    (record,) = tap.table()
    assert record["load_top"] == pytest.approx(0.5)  # one of the two places of every token


def test_a_dense_model_has_no_router():
    from tests.test_replay import decoder

    model = decoder("llama")
    assert find_routers(model, Subject.of(model).anatomy) == ()
