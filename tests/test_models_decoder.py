"""The own decoder against an obvious twin, and the laws that any causal language model keeps."""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stability_probe.models.decoder import Decoder, DecoderConfig

SIZES = {"vocab_size": 13, "n_layer": 2, "n_head": 4, "d_model": 16, "max_positions": 12}

configs = st.builds(
    DecoderConfig,
    **{name: st.just(size) for name, size in SIZES.items()},
    n_kv_head=st.sampled_from([None, 1, 2, 4]),
    d_ff=st.sampled_from([None, 10]),
    positions=st.sampled_from(["learned", "rotary"]),
    norm=st.sampled_from(["layernorm", "rmsnorm"]),
    norm_placement=st.sampled_from(["pre", "post"]),
    mlp=st.sampled_from(["gelu", "swiglu"]),
    qk_norm=st.booleans(),
    attention_softcap=st.sampled_from([None, 0.5]),
    output_softcap=st.sampled_from([None, 0.3]),
    tied=st.booleans(),
    bias=st.booleans(),
    hyper_streams=st.sampled_from([1, 3]),
)


def make(config, seed=0, spread=0.4):
    """A decoder whose every parameter is random, so that nothing hides behind an initial 0 or 1."""
    torch.manual_seed(seed)
    model = Decoder(config).double()
    for parameter in model.parameters():
        parameter.data += spread * torch.randn_like(parameter)
    return model.eval()


def ids(rows=2, positions=9, seed=1):
    return torch.randint(0, SIZES["vocab_size"], (rows, positions), generator=torch.Generator().manual_seed(seed))


def twin(model, tokens, mask=None):
    """One row, one head, one query at a time, from the weights alone."""
    config, weights = model.config, dict(model.named_parameters(remove_duplicate=False))

    def get(name):
        return weights.get(name)

    def linear(x, name):
        y = x @ get(f"{name}.weight").T
        return y if get(f"{name}.bias") is None else y + get(f"{name}.bias")

    def norm(x, name, kind=config.norm):
        if kind == "rmsnorm":
            return x / (x.pow(2).mean(-1, keepdim=True) + config.norm_eps).sqrt() * get(f"{name}.weight")
        y = (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + config.norm_eps).sqrt()
        y = y * get(f"{name}.weight")
        return y if get(f"{name}.bias") is None else y + get(f"{name}.bias")

    def rotary(x, position):
        half = len(x) // 2
        out = x.clone()
        for i in range(half):
            angle = torch.tensor(position * config.rope_theta ** (-2 * i / len(x)), dtype=torch.float32).item()
            cos, sin = math.cos(angle), math.sin(angle)
            out[i], out[i + half] = x[i] * cos - x[i + half] * sin, x[i + half] * cos + x[i] * sin
        return out

    def attention(x, name, real):
        width, group = config.d_model // config.n_head, config.n_head // config.kv_heads
        q, k, v = (linear(x, f"{name}.{which}_proj") for which in "qkv")
        out = torch.zeros_like(x)
        for head in range(config.n_head):
            ours, theirs = slice(head * width, (head + 1) * width), head // group
            shared = slice(theirs * width, (theirs + 1) * width)

            def prepared(t, part, position, which):
                piece = t[position, part]
                piece = norm(piece, f"{name}.{which}_norm", "rmsnorm") if config.qk_norm else piece
                return rotary(piece, position) if config.positions == "rotary" else piece

            for query in range(len(x)):
                allowed = [key for key in range(query + 1) if real[key] or key == query]
                logits = torch.stack(
                    [
                        prepared(q, ours, query, "q") @ prepared(k, shared, key, "k") / math.sqrt(width)
                        for key in allowed
                    ]
                )
                if config.attention_softcap is not None:
                    logits = config.attention_softcap * torch.tanh(logits / config.attention_softcap)
                share = logits.exp() / logits.exp().sum()
                out[query, ours] = sum(s * v[key, shared] for s, key in zip(share, allowed, strict=True))
        return linear(out, f"{name}.o_proj")

    def mlp(x, name):
        up = linear(x, f"{name}.up_proj")
        if config.mlp == "swiglu":
            gate = linear(x, f"{name}.gate_proj")
            return linear(gate / (1 + (-gate).exp()) * up, f"{name}.down_proj")
        return linear(up * 0.5 * (1 + torch.erf(up / math.sqrt(2))), f"{name}.down_proj")

    def block(x, name, real):
        if config.norm_placement == "pre":
            x = x + attention(norm(x, f"{name}.attn_norm"), f"{name}.attn", real)
            return x + mlp(norm(x, f"{name}.mlp_norm"), f"{name}.mlp")
        x = norm(x + attention(x, f"{name}.attn", real), f"{name}.attn_norm")
        return norm(x + mlp(x, f"{name}.mlp"), f"{name}.mlp_norm")

    rows = []
    for row, token_row in enumerate(tokens):
        real = [True] * len(token_row) if mask is None else mask[row].bool().tolist()
        x = get("embed.weight")[token_row]
        if config.positions == "learned":
            x = x + get("position_embed.weight")[: len(token_row)]
        streams = [x] * config.hyper_streams
        for layer in range(config.n_layer):
            name = f"blocks.{layer}"
            if config.hyper_streams == 1:
                streams = [block(streams[0], name, real)]
                continue
            mix, read, write = (get(f"{name}.stream_{part}") for part in ("mix", "read", "write"))
            taken = sum(r * s for r, s in zip(read, streams, strict=True))
            added = block(taken, name, real) - taken
            streams = [
                sum(m * s for m, s in zip(mix[i], streams, strict=True)) + write[i] * added
                for i in range(config.hyper_streams)
            ]
        x = sum(streams) / config.hyper_streams
        x = norm(x, "final_norm") if config.norm_placement == "pre" else x
        logits = x @ get("head.weight").T
        cap = config.output_softcap
        rows.append(logits if cap is None else cap * torch.tanh(logits / cap))
    return torch.stack(rows)


@settings(max_examples=25, deadline=None)
@given(config=configs, masked=st.booleans())
@example(config=DecoderConfig(**SIZES, n_kv_head=2, attention_softcap=0.5), masked=False)
@example(config=DecoderConfig(**SIZES, n_kv_head=2, positions="rotary", mlp="swiglu", qk_norm=True), masked=True)
def test_decoder_equals_its_twin(config, masked):
    model, tokens = make(config), ids(rows=2, positions=5)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 1]]) if masked else None
    with torch.no_grad():
        # Softmax weights and rotary angles are fp32 in the model: 24-bit significands, errors of a few 1e-7.
        torch.testing.assert_close(model(tokens, mask), twin(model, tokens, mask), rtol=1e-5, atol=1e-5)


@settings(max_examples=15, deadline=None)
@given(config=configs, cut=st.integers(1, 8))
def test_no_position_sees_the_future(config, cut):
    model, tokens = make(config), ids()
    changed = tokens.clone()
    changed[:, cut:] = (changed[:, cut:] + 1) % SIZES["vocab_size"]
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :cut], after[:, :cut], rtol=1e-9, atol=1e-9)
    assert not torch.allclose(before[:, cut:], after[:, cut:])


@settings(max_examples=15, deadline=None)
@given(config=configs, pad=st.integers(1, 3), left=st.booleans())
def test_padding_changes_nothing_on_either_side(config, pad, left):
    model, tokens = make(config), ids()
    zeros, ones = torch.zeros(2, pad, dtype=torch.long), torch.ones_like(tokens)
    order = (zeros, tokens) if left else (tokens, zeros)
    mask = torch.cat((zeros, ones) if left else (ones, zeros), dim=1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        padded = model(torch.cat(order, dim=1), attention_mask=mask, position_ids=positions)
        bare = model(tokens)
    assert padded.isfinite().all()
    torch.testing.assert_close(padded[:, pad:] if left else padded[:, :-pad], bare, rtol=1e-6, atol=1e-6)


def test_streams_start_as_the_plain_residual():
    for placement in ("pre", "post"):
        plain, mixed = (
            make(DecoderConfig(**SIZES, norm_placement=placement, hyper_streams=n), spread=0.0) for n in (1, 4)
        )
        mixed.load_state_dict(plain.state_dict(), strict=False)
        torch.testing.assert_close(mixed(ids()), plain(ids()), rtol=1e-12, atol=1e-12)


def test_qk_norm_makes_attention_blind_to_the_scale_of_its_weights():
    model = make(DecoderConfig(**SIZES, qk_norm=True))
    before = model(ids())
    model.blocks[0].attn.q_proj.weight.data *= 1000
    torch.testing.assert_close(model(ids()), before, rtol=1e-4, atol=1e-4)


def test_softcaps_bound_the_logits():
    model = make(DecoderConfig(**SIZES, output_softcap=2.0), spread=5.0)
    assert model(ids()).abs().max() <= 2.0


def test_initial_spread_follows_the_recipe():
    model = Decoder(DecoderConfig(vocab_size=64, n_layer=8, n_head=4, d_model=128, bias=True))
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            assert parameter.std().item() == pytest.approx(0.02 / (4 if residual else 1), rel=0.05), name
        elif name.endswith("bias"):
            assert not parameter.any(), name


@pytest.mark.parametrize("changes", [{}, {"positions": "rotary", "norm": "rmsnorm", "mlp": "swiglu", "n_kv_head": 2}])
def test_it_learns(changes):
    torch.manual_seed(0)
    model, tokens = Decoder(DecoderConfig(**SIZES, **changes)), ids(rows=4, positions=12)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(60):
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(SIZES["vocab_size"]), abs=0.1)
    assert losses[-1] < 0.2


@given(config=configs)
def test_config_survives_its_dict(config):
    assert DecoderConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    "changes",
    [
        {"n_head": 3},
        {"n_head": 0},
        {"n_layer": -1},
        {"n_layer": "2"},
        {"n_kv_head": 3},
        {"positions": "alibi"},
        {"norm": "batchnorm"},
        {"d_ff": 0},
        {"n_head": 16, "positions": "rotary"},
        {"colour": "red"},
    ],
)
def test_senseless_configs_are_refused(changes):
    with pytest.raises(ValueError, match=r"must|need|unknown"):
        DecoderConfig.from_dict({**SIZES, **changes})


def test_too_many_positions_are_refused():
    with pytest.raises(ValueError, match="max_positions"):
        make(DecoderConfig(**SIZES))(ids(positions=13))
