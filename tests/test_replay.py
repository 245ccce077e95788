"""The replay against a plain loop, and the promise that measuring does not disturb."""

import gc
import math
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stability_probe.batches.base import IGNORED, Batch
from stability_probe.errors import REPLAY_FAILED, ProbeError
from stability_probe.models.decoder import Decoder, DecoderConfig
from stability_probe.replay import OFFSETS, Subject, replay, token_losses
from stability_probe.tables import head_table, module_table, parameter_table, precision_gap, row_gradients

STYLES = {
    "gpt2": {"bias": True},
    "llama": {"positions": "rotary", "norm": "rmsnorm", "mlp": "swiglu", "n_kv_head": 2, "tied": False},
    "qwen3": {"positions": "rotary", "norm": "rmsnorm", "mlp": "swiglu", "qk_norm": True},
    "gemma2": {"positions": "rotary", "attention_softcap": 50.0, "output_softcap": 30.0},
    "hyper": {"hyper_streams": 2, "norm_placement": "post"},
}


def decoder(style="gpt2", **changes):
    torch.manual_seed(0)
    config = {"vocab_size": 61, "n_layer": 2, "n_head": 4, "d_model": 32, "max_positions": 64}
    return Decoder(DecoderConfig(**{**config, **STYLES[style], **changes})).eval()


def batch_of(B=3, T=17, mask=None, seed=1):
    ids = torch.randint(0, 61, (B, T), generator=torch.Generator().manual_seed(seed))
    targets = torch.full_like(ids, IGNORED)
    targets[:, :-1] = ids[:, 1:]
    if mask is not None:
        targets[:, :-1] = targets[:, :-1].masked_fill(~(mask[:, :-1] & mask[:, 1:]), IGNORED)
    return Batch(ids, targets, mask_BT=mask)


def plain(model, batch):
    """What a training loop would do, one row at a time, with nothing attached."""
    valid = int((batch.targets_BT != IGNORED).sum())
    for parameter in model.parameters():
        parameter.grad = None
    losses = []
    for row in range(batch.ids_BT.shape[0]):
        logits = model(batch.ids_BT[row : row + 1])
        loss, _ = token_losses(logits, batch.targets_BT[row : row + 1])
        (loss.sum() / valid).backward()
        losses.append(loss.detach())
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = None
    return torch.cat(losses), grads


@pytest.mark.parametrize("style", STYLES)
def test_loss_and_gradients_with_taps_are_bit_equal_to_those_without(style):
    model, batch = decoder(style), batch_of()
    want_loss, want_grads = plain(model, batch)
    trace = replay(Subject.of(model), batch, sketches=True)
    assert torch.equal(trace.token_loss_BT, want_loss)
    assert trace.gradients is not None
    assert trace.gradients.total.keys() == want_grads.keys()
    for name, grad in want_grads.items():
        assert torch.equal(trace.gradients.total[name], grad), name
    assert trace.modules
    assert sorted(trace.heads) == [0, 1]
    bare = replay(Subject.of(model), batch, detail=False)
    assert torch.equal(bare.token_loss_BT, want_loss)
    assert not bare.modules


def test_token_losses_are_cross_entropy():
    logits, targets = torch.randn(2, 9, 61) * 5, torch.randint(0, 61, (2, 9))
    targets[0, 3] = IGNORED
    got, log_z = token_losses(logits, targets)
    want = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none", ignore_index=IGNORED)
    assert torch.allclose(got.flatten(), want, atol=1e-5)
    assert torch.allclose(log_z, logits.double().logsumexp(-1).float())


def test_row_norms_and_cosines_against_separate_replays():
    model, batch = decoder(), batch_of(B=4, T=33)
    trace = replay(Subject.of(model), batch)
    norms, cosines = row_gradients(trace, 4)
    rows = []
    for row in range(4):
        one = Batch(batch.ids_BT[row : row + 1], batch.targets_BT[row : row + 1])
        _, grads = plain(model, one)
        rows.append(torch.cat([g.flatten() for g in grads.values()]) / 4)
    for row in range(4):
        rest = sum(other for index, other in enumerate(rows) if index != row)
        assert norms[row] == pytest.approx(rows[row].norm().item(), rel=1e-4)
        assert cosines[row] == pytest.approx(F.cosine_similarity(rows[row], rest, dim=0).item(), abs=0.05)
    assert trace.global_grad_norm == pytest.approx(sum(rows).norm().item(), rel=1e-4)


def test_right_padding_changes_nothing():
    model, short = decoder(), batch_of(B=2, T=12)
    ids = F.pad(short.ids_BT, (0, 8), value=5)
    mask = torch.arange(20).expand(2, 20) < 12
    padded = Batch(ids, F.pad(short.targets_BT, (0, 8), value=IGNORED), mask_BT=mask)
    one, other = replay(Subject.of(model), short), replay(Subject.of(model), padded)
    assert torch.equal(one.token_loss_BT, other.token_loss_BT[:, :12])
    assert one.global_grad_norm == other.global_grad_norm


def test_rows_of_unequal_length_in_one_microbatch_agree_with_rows_alone():
    model = decoder("llama")
    mask = torch.arange(20).expand(3, 20) < torch.tensor([[20], [13], [7]])
    batch = batch_of(B=3, T=20, mask=mask)
    alone, together = replay(Subject.of(model), batch), replay(Subject.of(model), batch, microbatch=3)
    assert alone.loss == pytest.approx(together.loss, abs=1e-5)
    assert alone.global_grad_norm == pytest.approx(together.global_grad_norm, rel=1e-4)


def test_offset_losses_are_losses_at_moved_targets():
    model, batch = decoder(), batch_of(B=2, T=11)
    trace = replay(Subject.of(model), batch)
    for offset in OFFSETS:
        total, count = 0.0, 0
        for row in range(2):
            logits = model(batch.ids_BT[row : row + 1]).detach()[0]
            for t in range(11):
                source = t + offset
                if 0 <= source < 11 and batch.targets_BT[row, source] != IGNORED:
                    total += F.cross_entropy(logits[t], batch.targets_BT[row, source]).item()
                    count += 1
        assert sum(s[offset][1] for s in trace.offset_sums) == count
        assert sum(s[offset][0] for s in trace.offset_sums) == pytest.approx(total, rel=1e-4)


def test_a_nan_is_counted_where_it_first_appears():
    model = decoder()
    with torch.no_grad():
        model.blocks[1].mlp.get_parameter(next(n for n, _ in model.blocks[1].mlp.named_parameters())).fill_(math.nan)
    subject, batch = Subject.of(model), batch_of()
    trace = replay(subject, batch)
    assert math.isnan(trace.loss)
    table = module_table(subject, trace)
    bad = table[table["nonfinite"] > 0]
    assert bad.iloc[0]["module"].startswith("blocks.1.mlp")


def test_absmax_names_row_position_and_channel():
    model = decoder()
    subject, batch = Subject.of(model), batch_of()
    captured = []
    handle = model.blocks[0].register_forward_hook(lambda _m, _i, out: captured.append(out.detach()))
    table = module_table(subject, replay(subject, batch))
    handle.remove()
    whole = torch.cat(captured)
    row, position, channel = (int(i) for i in torch.unravel_index(whole.abs().argmax(), whole.shape))
    found = table[table["module"] == "blocks.0"].iloc[0]
    assert (found["row"], found["position"], found["channel"]) == (row, position, channel)
    assert found["absmax"] == pytest.approx(whole.abs().max().item())
    assert found["rms"] == pytest.approx(whole.square().mean().sqrt().item(), rel=1e-5)
    assert found["grad_norm"] > 0


def test_gap_between_precisions_against_stored_outputs():
    model = decoder(n_layer=1)
    subject, batch = Subject.of(model), batch_of(B=1, T=30)
    outputs = []
    handle = model.blocks[0].register_forward_hook(lambda _m, _i, out: outputs.append(out.detach().float()))
    full, low = replay(subject, batch, sketches=True), replay(subject, batch, "bf16", sketches=True)
    handle.remove()
    want = ((outputs[1] - outputs[0]).norm() / outputs[0].norm()).item()
    table = module_table(subject, full, reduced=low)
    assert table[table["module"] == "blocks.0"].iloc[0]["gap_bf16"] == pytest.approx(want, rel=0.1)
    gap = precision_gap(full, low)
    valid = full.has_target_BT
    assert gap.token_gap == pytest.approx((full.token_loss_BT - low.token_loss_BT)[valid].abs().mean().item(), rel=1e-4)
    assert gap.nonfinite == 0


def test_a_model_is_left_as_it_was():
    model, batch = decoder(), batch_of()
    before = {name: p.clone() for name, p in model.named_parameters()}
    replay(Subject.of(model), batch, "bf16")
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in model.modules())
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(61, 8)

    def forward(self, ids):
        raise ValueError("shapes do not fit")


def test_a_failing_forward_is_a_three_part_error_and_leaves_no_hooks():
    model = Broken()
    with pytest.raises(ProbeError, match="replay failed") as caught:
        replay(Subject.of(model), batch_of())
    assert caught.value.exit_code == REPLAY_FAILED
    assert "shapes do not fit" in caught.value.why
    assert not any(m._forward_hooks for m in model.modules())


class Tuple(nn.Module):
    """nanoGPT's habit: logits of the last position only, unless there are targets."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(61, 8), nn.Linear(8, 61)

    def forward(self, idx, targets=None):
        logits = self.out(self.embed(idx))
        return (logits, None) if targets is not None else (logits[:, -1:], None)


def test_targets_are_passed_to_models_that_need_them():
    trace = replay(Subject.of(Tuple()), batch_of())
    assert math.isfinite(trace.loss)


class Little(nn.Module):
    def __init__(self, head=61, sparse=False):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(61, 8, sparse=sparse), nn.Linear(8, head)

    def forward(self, ids):
        return self.head(self.embed(ids))


class ByKeyword(Little):
    def forward(self, *, input_ids):
        return super().forward(input_ids)


class Second(Little):
    def forward(self, past=None, idx=None):
        return super().forward(idx)


class Quits(Little):
    def forward(self, ids):
        raise SystemExit(7)


@pytest.mark.parametrize("kind", [ByKeyword, Second])
def test_ids_go_to_the_parameter_that_is_named_after_them(kind):
    want = replay(Subject.of(Little()), batch_of()).token_loss_BT
    assert torch.equal(replay(Subject.of(kind()), batch_of()).token_loss_BT, want)


def test_sparse_gradients_are_gradients():
    dense, sparse = (replay(Subject.of(Little(sparse=sparse)), batch_of()) for sparse in (False, True))
    assert sparse.global_grad_norm == pytest.approx(dense.global_grad_norm)


@pytest.mark.parametrize(("model", "why"), [(Quits(), "SystemExit"), (Little(head=7), "7 logits")])
def test_a_model_that_exits_or_has_too_small_a_head_is_a_three_part_error(model, why):
    with pytest.raises(ProbeError) as caught:
        replay(Subject.of(model), batch_of())
    assert caught.value.exit_code == REPLAY_FAILED and why in caught.value.why


def test_head_table_has_one_line_per_head():
    subject = Subject.of(decoder("llama"))
    table = head_table(subject, replay(subject, batch_of()))
    assert list(zip(table["layer"], table["head"], strict=True)) == [(la, h) for la in range(2) for h in range(4)]
    assert table["entropy"].between(0, math.log(17)).all()


def test_complex_and_empty_parameters_have_a_line_in_the_table():
    model = Little()
    model.phases = nn.Parameter(torch.full((3,), 3 + 4j), requires_grad=False)
    model.nothing = nn.Parameter(torch.zeros(0))
    subject = Subject.of(model)
    table = parameter_table(subject, replay(subject, batch_of()), None, None, None).set_index("parameter")
    assert table.loc["phases", "absmax"] == 5.0 and table.loc["nothing", "numel"] == 0


def test_the_gradient_goes_with_its_trace():
    trace = replay(Subject.of(decoder()), batch_of(), sketches=True)
    gone = weakref.ref(trace.gradients)
    gc.disable()  # half a gigabyte that waits for a collection is half a gigabyte in use
    try:
        del trace
        assert gone() is None
    finally:
        gc.enable()


def test_outputs_of_inference_mode_and_scalars_are_no_obstacle():
    class Frozen(nn.Linear):
        def forward(self, x):
            with torch.inference_mode():
                return super().forward(x.detach())

    class Size(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, x):
            return self.weight * x.mean()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.frozen, self.size, self.head = nn.Embedding(11, 8), Frozen(8, 8), Size(), nn.Linear(8, 11)

        def forward(self, ids):
            x = self.embed(ids)
            return self.head(x + self.frozen(x).clone()) + self.size(x)

    trace = replay(Subject.of(Model()), Batch(torch.tensor([[1, 2, 3, 4]]), torch.tensor([[2, 3, 4, IGNORED]])))
    assert math.isfinite(trace.loss) and trace.modules["frozen"].absmax > 0 and "size" not in trace.modules


class NormedTwice(nn.Module):
    """One norm before and after the layer, as nanochat's: its first output is finite, its second is not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(8, 4), nn.LayerNorm(4)
        self.up, self.head = nn.Linear(4, 4), nn.Linear(4, 8)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.norm(self.embed(ids))
        return self.head(self.norm(self.up(hidden)))


def test_the_first_output_that_is_not_finite_counts_and_not_the_first_call_of_its_module():
    batch = Batch(torch.arange(4)[None], torch.arange(4)[None])
    subject = Subject.of(NormedTwice())
    trace = replay(subject, batch)
    with torch.no_grad():
        subject.module.up.weight[0, 0] = math.inf
    gap = precision_gap(trace, replay(subject, batch))
    assert list(trace.modules).index("norm") < list(trace.modules).index("up")
    assert gap.first_nonfinite == "up"
