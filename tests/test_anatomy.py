"""Finding blocks, attention, heads and norms in models of several families."""

import pytest
import torch
from torch import nn

from stability_probe.models.anatomy import dissect, head_rows
from tests.test_replay import STYLES, decoder

transformers = pytest.importorskip("transformers")


def hf(name):
    small = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    configs = {
        "gpt2": lambda: transformers.GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64),
        "llama": lambda: transformers.LlamaConfig(**small, **heads),
        "qwen3": lambda: transformers.Qwen3Config(**small, **heads, head_dim=8),
        "gemma2": lambda: transformers.Gemma2Config(**small, **heads, head_dim=8),
        "neox": lambda: transformers.GPTNeoXConfig(**small, num_attention_heads=4),
        "mixtral": lambda: transformers.MixtralConfig(**small, **heads, num_local_experts=2),
    }
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(configs[name]()).eval()


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3", "gemma2", "neox", "mixtral"])
def test_parts_of_transformers_models(name):
    model = hf(name)
    anatomy = dissect(model)
    assert len(anatomy.blocks) == 2
    assert [site.layer for site in anatomy.attention] == [0, 1]
    assert all(site.n_heads == 4 and site.head_width == 8 for site in anatomy.attention)
    assert len(anatomy.mlps) == 2
    assert anatomy.head in ("lm_head", "embed_out")
    assert anatomy.final_norm is not None
    assert all(anatomy.layer_of(norm) < 0 for norm in [anatomy.final_norm])
    assert bool(anatomy.attention[0].query_norm) == (name == "qwen3")


@pytest.mark.parametrize("style", STYLES)
def test_parts_of_the_own_decoder(style):
    anatomy = dissect(decoder(style))
    assert anatomy.blocks == ("blocks.0", "blocks.1")
    assert [site.name for site in anatomy.attention] == ["blocks.0.attn", "blocks.1.attn"]
    assert anatomy.role_of("blocks.1.mlp") == "mlp"
    assert anatomy.role_of("embed") == "embedding"
    assert anatomy.kind_of("blocks.1.attn.q_proj.weight") == "blocks.*.attn.q_proj.weight"
    assert anatomy.kind_of("embed.weight") == "embed.weight"


def queries_of(model, ids, layer):
    """What the attention of a layer is given as queries and keys, seen at the SDPA call."""
    calls = []
    original = nn.functional.scaled_dot_product_attention

    def spy(query, key, *args, **kwargs):
        calls.append((query.detach(), key.detach()))
        return original(query, key, *args, **kwargs)

    nn.functional.scaled_dot_product_attention = spy
    try:
        model(ids)
    finally:
        nn.functional.scaled_dot_product_attention = original
    return calls[layer]


@pytest.mark.parametrize("name", ["gpt2", "llama", "neox"])
@pytest.mark.parametrize("side", ["q", "k"])
def test_scaling_a_heads_rows_scales_that_head_alone(name, side):
    model, ids, head = hf(name), torch.randint(0, 97, (1, 9)), 3
    site = dissect(model).attention[1]
    before = queries_of(model, ids, 1)["qk".index(side)]
    rows = head_rows(model, site, head, side)
    with torch.no_grad():
        for parameter in (rows.parameter, rows.bias):
            if parameter is not None:
                rows.of(model.get_parameter(parameter)).mul_(3)
    after = queries_of(model, ids, 1)["qk".index(side)]
    shared = head if after.shape[1] == 4 else 1
    changed = [h for h in range(after.shape[1]) if not torch.allclose(before[:, h], after[:, h])]
    expected = [shared] if side == "q" or after.shape[1] != 4 or name != "llama" else [2, 3]
    assert changed == expected
    assert torch.allclose(after[:, shared], 3 * before[:, shared], atol=1e-4)


def test_a_model_without_blocks_has_no_layers():
    anatomy = dissect(nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7)))
    assert anatomy.attention == ()
    assert anatomy.head == "1"
    assert anatomy.layer_of("1") == -1


# --- latent attention -----------------------------------------------------------------------------


def latent_model():
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "deepseek_v2", vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, head_dim=8, q_lora_rank=None, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8,
        v_head_dim=8, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, n_shared_experts=1,
        moe_intermediate_size=16, first_k_dense_replace=1, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def test_a_head_of_latent_attention_is_clipped_and_its_siblings_are_not():
    """The rotary key belongs to all heads: the head's logits take the whole factor from what is its own."""
    from stability_probe.interventions.clip_heads import clipped_heads

    model = latent_model()
    sites = {site.layer: site for site in dissect(model).attention}
    ids = torch.randint(96, (2, 24), generator=torch.Generator().manual_seed(1))

    def logits(layer):
        weights = model(ids, output_attentions=True).attentions[layer].double()
        return weights.clamp_min(1e-300).log()

    with torch.no_grad():
        shared = model.model.layers[0].self_attn.kv_a_proj_with_mqa.weight.clone()
        before = logits(0)
        with clipped_heads(model, sites, {(0, 2): 0.25}):
            after = logits(0)
            assert torch.equal(shared, model.model.layers[0].self_attn.kv_a_proj_with_mqa.weight)
    last, keys = -1, slice(0, 20)
    # Differences of log weights are differences of logits.
    was, now = (x[:, :, last, keys] - x[:, :, last, :1] for x in (before, after))
    assert torch.allclose(now[:, 2], 0.25 * was[:, 2], atol=1e-3)
    others = [0, 1, 3]
    assert torch.allclose(now[:, others], was[:, others], atol=1e-4)
