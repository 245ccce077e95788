"""The attention tap against the seed's table and against an obvious twin that keeps the whole matrix."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stability_probe.taps.attention import AttentionTap, HeadStatistics, statistics_from_logits, statistics_from_qk


def twin(logits_BHTS, allowed_BHTS, first=0):
    """Statistics from the full logits: slow, and plain to see."""
    B, H, T, _ = logits_BHTS.shape
    half = first + (T - first) // 2
    result = []
    for b in range(B):
        for h in range(H):
            best, entropies, tops, keys = (-1.0, 0, 0), [], [], []
            for t in range(first, T):
                seen = allowed_BHTS[b, h, t].nonzero().flatten().tolist()
                row = logits_BHTS[b, h, t].double()
                for s in seen:
                    if abs(row[s].item()) > best[0]:
                        best = (abs(row[s].item()), t, s)
                if t >= half and len(seen) >= 2:
                    p = row[seen].softmax(0)
                    entropies.append(-(p * p.log().clamp_min(-1e9)).sum().item())
                    tops.append(p.max().item())
                    keys.append(seen[int(p.argmax())])
            share = max(keys.count(k) for k in keys) / len(keys) if keys else math.nan
            mean = [sum(v) / len(v) if v else math.nan for v in (entropies, tops)]
            result.append((*best, *mean, share))
    return result


def seen(statistics: HeadStatistics):
    parts = (
        statistics.max_logit_BH, statistics.query_BH, statistics.key_BH, statistics.entropy_BH,
        statistics.top_weight_BH, statistics.top_key_share_BH,
    )  # fmt: skip
    return list(zip(*(p.flatten().tolist() for p in parts), strict=True))


def assert_same(got, want):
    for one, other in zip(got, want, strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-5, nan_ok=True)


def causal_mask(T, S=None):
    return torch.ones(T, S or T, dtype=torch.bool).tril()


SCALES = [(1, 5.1, 5.43, 0.04), (2, 20.6, 1.88, 0.51), (4, 82.4, 0.32, 0.88), (8, 329.4, 0.08, 0.97)]


@pytest.mark.parametrize(("scale", "max_logit", "entropy", "top"), SCALES)
def test_entropy_collapse_of_the_seed(scale, max_logit, entropy, top):
    torch.manual_seed(0)
    T, d = 512, 64
    x = torch.randn(T, 256)
    w_q, w_k = torch.randn(256, d) / 16, torch.randn(256, d) / 16
    q, k = x @ (w_q * scale), x @ (w_k * scale)
    plain = statistics_from_qk(q[None, None], k[None, None], causal=True)
    assert round(plain.max_logit_BH.item(), 1) == max_logit
    assert round(plain.entropy_BH.item(), 2) == entropy
    assert round(plain.top_weight_BH.item(), 2) == top
    normed = statistics_from_qk(F.rms_norm(q, (d,))[None, None], F.rms_norm(k, (d,))[None, None], causal=True)
    assert round(normed.max_logit_BH.item(), 1) == 4.9
    assert round(normed.entropy_BH.item(), 2) == 5.45
    assert round(normed.top_weight_BH.item(), 2) == 0.03


@pytest.mark.parametrize("T", [1, 2, 7, 130, 257])
def test_causal_and_grouped_query_attention_against_the_twin(T):
    torch.manual_seed(T)
    q, k = torch.randn(2, 4, T, 8) * 2, torch.randn(2, 2, T, 8)
    logits = q @ k.repeat_interleave(2, 1).transpose(-1, -2) / math.sqrt(8)
    want = twin(logits, causal_mask(T).expand_as(logits))
    assert_same(seen(statistics_from_qk(q, k, causal=True)), want)


def test_windowed_bool_mask_and_left_padding():
    torch.manual_seed(1)
    T, first = 40, 5
    q, k = torch.randn(1, 2, T, 8), torch.randn(1, 2, T, 8)
    allowed = causal_mask(T) & ~causal_mask(T).tril(-9)
    allowed[:, :first] = False
    logits = q @ k.transpose(-1, -2) / math.sqrt(8)
    want = twin(logits, allowed.expand_as(logits), first)
    got = statistics_from_qk(q, k, mask=allowed[None, None], first_query=first)
    assert_same(seen(got), want)


@pytest.mark.parametrize("fill", [-math.inf, torch.finfo(torch.float32).min, -1e9, -1e4])
def test_float_masks_of_every_kind_are_the_same_mask(fill):
    torch.manual_seed(2)
    T = 33
    q, k = torch.randn(1, 2, T, 8), torch.randn(1, 2, T, 8)
    logits = q @ k.transpose(-1, -2) / math.sqrt(8)
    mask = torch.zeros(T, T).masked_fill(~causal_mask(T), fill)
    want = twin(logits, causal_mask(T).expand_as(logits))
    assert_same(seen(statistics_from_qk(q, k, mask=mask[None, None])), want)
    assert_same(seen(statistics_from_logits(logits + mask)), want)


def test_alibi_shapes_the_weights_and_not_the_largest_logit():
    torch.manual_seed(3)
    T = 64
    q, k = torch.randn(1, 1, T, 8), torch.randn(1, 1, T, 8)
    distance = torch.arange(T)[None, :] - torch.arange(T)[:, None]
    mask = (distance * 0.5).masked_fill(~causal_mask(T), -math.inf)
    plain = statistics_from_qk(q, k, causal=True)
    biased = statistics_from_qk(q, k, mask=mask[None, None])
    assert biased.max_logit_BH.item() == pytest.approx(plain.max_logit_BH.item())
    assert biased.entropy_BH.item() < plain.entropy_BH.item()


def test_a_fixed_position_is_told_from_a_collapsed_head():
    T = 64
    logits = torch.zeros(1, 1, T, T)
    logits[..., 3] = 20.0
    logits = logits.masked_fill(~causal_mask(T), -math.inf)
    sink = statistics_from_logits(logits)
    assert sink.top_key_share_BH.item() == 1.0
    assert sink.entropy_BH.item() < 0.01


class Eager(nn.Module):
    """Attention as people write it by hand."""

    def forward(self, q, k, how):
        logits = (q @ k.transpose(-1, -2)).masked_fill(~causal_mask(q.shape[2]), -math.inf)
        if how == "function":
            return F.softmax(logits, dim=-1)
        if how == "torch":
            return torch.softmax(logits, -1)
        if how == "method":
            return logits.softmax(dim=-1)
        return F.scaled_dot_product_attention(q, k, k, is_causal=True, scale=1.0)


@pytest.mark.parametrize("how", ["function", "torch", "method", "sdpa"])
def test_every_way_to_call_attention_is_seen(how):
    torch.manual_seed(4)
    q, k = torch.randn(1, 2, 16, 8), torch.randn(1, 2, 16, 8)
    found = []
    model = nn.ModuleDict({"attn": Eager()})
    tap = AttentionTap(lambda layer, statistics: found.append((layer, statistics)))
    with tap.on(model, {"attn": 7}):
        model["attn"](q, k, how)
    ((layer, statistics),) = found
    assert layer == 7
    assert_same(seen(statistics), seen(statistics_from_qk(q, k, scale=1.0, causal=True)))


def test_softmax_outside_attention_is_not_attention():
    found = []
    model = nn.ModuleDict({"attn": nn.Identity()})
    with AttentionTap(lambda *seen: found.append(seen)).on(model, {"attn": 0}):
        torch.randn(2, 3, 4, 4).softmax(-1)
        model["attn"](torch.randn(6, 8)).softmax(-1)
    assert found == []


def test_hooks_leave_on_exceptions_too():
    model = nn.ModuleDict({"attn": Eager()})
    tap = AttentionTap(lambda *_: None)
    with pytest.raises(RuntimeError), tap.on(model, {"attn": 0}):
        model["attn"](torch.randn(1, 1, 4, 4), torch.randn(1, 1, 4, 5), "torch")
    assert not model["attn"]._forward_hooks
    assert not model["attn"]._forward_pre_hooks
    assert tap.stack == []
