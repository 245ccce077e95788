"""Own checkpoints, nanoGPT's, and anyone's function: built, filled, and honest about keys that do not fit."""

import json
import math
import sys

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from stability_probe.checkpoints import read_checkpoint
from stability_probe.checkpoints.base import Checkpoint, OptimizerState
from stability_probe.checkpoints.optimizer import name_optimizer_state
from stability_probe.errors import ProbeError
from stability_probe.models import load_model
from stability_probe.models.decoder import Decoder, DecoderConfig
from stability_probe.models.fit import fit
from stability_probe.models.nanogpt import NanoGPT

ARGUMENTS = {"n_layer": 2, "n_head": 2, "n_embd": 8, "block_size": 16, "vocab_size": 11, "bias": True, "dropout": 0.1}
IDS = torch.randint(0, 11, (2, 9), generator=torch.Generator().manual_seed(1))
SIZES = {"vocab_size": 11, "n_layer": 2, "n_head": 2, "d_model": 8}

FILE = """
import dataclasses
from stability_probe.models.nanogpt import NanoGPT

@dataclasses.dataclass
class Arguments:
    n_layer: int = 2

def make(n_layer=2, n_embd=8): return NanoGPT(n_layer, 2, n_embd, 16, 11, True)
def with_config(config): return make(config["n_layer"], config["n_embd"])
def with_optional_config(config=None): return make(config["n_layer"])
def with_keywords(n_layer, *, n_embd): return make(n_layer, n_embd)
def with_nothing(): return make()
def with_foreign_default(device="cpu"):
    assert device == "cpu"
    return make()
def with_two(a, b): return make()
def fails(config): raise KeyError("no such thing")
def leaves(): raise SystemExit(2)
def returns_text(): return "model"
def is_lazy():
    import torch
    return torch.nn.LazyLinear(4)
def on_meta():
    import torch
    with torch.device("meta"): return make()
NUMBER = 3
"""


def nanogpt(bias=True, seed=0):
    torch.manual_seed(seed)
    model = NanoGPT(2, 2, 8, 16, 11, bias)
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return model


def ckpt(tmp_path, model, **more):
    state = {f"_orig_mod.{name}": tensor for name, tensor in model.state_dict().items()}
    path = tmp_path / "ckpt.pt"
    torch.save({"model": state, "model_args": ARGUMENTS, "iter_num": 5, "config": {}} | more, path)
    return read_checkpoint(path)


def gpt2_twin(model, tokens):
    """GPT-2 in nanoGPT's parameters, one head at a time with an explicit softmax."""
    p = dict(model.named_parameters())

    def norm(x, name):
        y = (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
        y = y * p[f"{name}.weight"]
        return y + p[f"{name}.bias"] if f"{name}.bias" in p else y

    def linear(x, name):
        y = x @ p[f"{name}.weight"].T
        return y + p[f"{name}.bias"] if f"{name}.bias" in p else y

    n_positions, width = tokens.shape[1], p["transformer.wte.weight"].shape[1]
    x = p["transformer.wte.weight"][tokens] + p["transformer.wpe.weight"][:n_positions]
    future = torch.ones(n_positions, n_positions).triu(1).bool()
    for layer in range(2):
        name = f"transformer.h.{layer}"
        fused = linear(norm(x, f"{name}.ln_1"), f"{name}.attn.c_attn")
        heads = []
        for head in range(2):
            at = slice(head * width // 2, (head + 1) * width // 2)
            q, k, v = (
                fused[..., :width][..., at],
                fused[..., width : 2 * width][..., at],
                fused[..., 2 * width :][..., at],
            )
            logits = (q @ k.transpose(1, 2) / math.sqrt(width // 2)).masked_fill(future, -math.inf)
            heads.append(logits.softmax(-1) @ v)
        x = x + linear(torch.cat(heads, -1), f"{name}.attn.c_proj")
        hidden = linear(norm(x, f"{name}.ln_2"), f"{name}.mlp.c_fc")
        x = x + linear(hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2))), f"{name}.mlp.c_proj")
    return norm(x, "transformer.ln_f") @ p["transformer.wte.weight"].T


@pytest.mark.parametrize("bias", [True, False])
def test_nanogpt_equals_its_twin(bias):
    model = nanogpt(bias)
    torch.testing.assert_close(model(IDS), gpt2_twin(model, IDS), rtol=1e-4, atol=1e-5)


def test_nanogpt_names_and_order_are_the_files():
    names = [name for name, _ in NanoGPT(1, 2, 8, 16, 11, True).named_parameters()]
    block = ["ln_1.weight", "ln_1.bias", "attn.c_attn.weight", "attn.c_attn.bias", "attn.c_proj.weight"]
    block += ["attn.c_proj.bias", "ln_2.weight", "ln_2.bias", "mlp.c_fc.weight", "mlp.c_fc.bias"]
    block += ["mlp.c_proj.weight", "mlp.c_proj.bias"]
    want = ["wte.weight", "wpe.weight", *(f"h.0.{name}" for name in block), "ln_f.weight", "ln_f.bias"]
    assert names == [f"transformer.{name}" for name in want]


def test_a_nanogpt_checkpoint_runs_with_its_optimizer(tmp_path):
    model = nanogpt()
    named = list(model.named_parameters())
    groups = [[p for _, p in named if p.dim() >= 2], [p for _, p in named if p.dim() < 2]]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=1e-3)
    for index, (_, parameter) in enumerate(named):
        parameter.grad = torch.full_like(parameter, index + 1.0)
    optimizer.step()
    checkpoint = ckpt(tmp_path, model, optimizer=optimizer.state_dict())
    loaded = load_model(checkpoint)
    assert torch.equal(loaded.module(IDS), model(IDS))
    assert (loaded.source, loaded.vocab_size, checkpoint.step) == ("decoder", 11, 5)
    assert not any(vars(loaded.keys).values())
    state = name_optimizer_state(checkpoint.optimizer, loaded.module)
    assert isinstance(state, OptimizerState)
    for index, (name, _) in enumerate(named):
        assert state.exp_avg[name].flatten()[0].item() == pytest.approx(0.1 * (index + 1))


def test_stored_causal_masks_are_not_unexpected(tmp_path):
    model = nanogpt()
    state = model.state_dict() | {"transformer.h.0.attn.bias": torch.ones(1, 1, 16, 16).tril()}
    torch.save({"model": state, "model_args": ARGUMENTS}, tmp_path / "ckpt.pt")
    assert load_model(read_checkpoint(tmp_path)).keys.unexpected == ()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("place", ["folder", "pt"])
def test_the_own_decoder_needs_no_model_option(tmp_path, tied, place):
    config = DecoderConfig(**SIZES, tied=tied, positions="rotary", norm="rmsnorm", mlp="swiglu", qk_norm=True)
    model = Decoder(config).bfloat16()
    if place == "folder":
        tensors = {name: item for name, item in model.state_dict().items() if not tied or name != "head.weight"}
        save_file(tensors, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    else:
        torch.save({"model": model.state_dict(), "config": config.to_dict()}, tmp_path / "x.pt")
    loaded = load_model(read_checkpoint(tmp_path))
    assert torch.equal(loaded.module(IDS), model.float()(IDS))
    assert not any(vars(loaded.keys).values()) and loaded.vocab_size == 11
    assert (loaded.module.head.weight is loaded.module.embed.weight) == tied
    assert all(p.dtype == torch.float32 and p.requires_grad and p.grad is None for p in loaded.module.parameters())


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "stability_probe_decoder"},
        {"model_type": "stability_probe_decoder", **SIZES, "n_head": 3},
        {"model_type": "stability_probe_decoder", **SIZES, "unknown": 1},
        ARGUMENTS | {"n_head": 3},
        ARGUMENTS | {"n_embd": "wide"},
        ARGUMENTS | {"n_embd": 0, "n_head": 0},
        ARGUMENTS | {"vocab_size": 10**18},
        ARGUMENTS | {"vocab_size": 10**11},  # would take 3 TB
        ARGUMENTS | {"n_layer": 10**9},
    ],
)
def test_configurations_that_make_no_model(tmp_path, config):
    torch.save({"model": nanogpt().state_dict(), "model_config": config}, tmp_path / "x.pt")
    with pytest.raises(ProbeError, match=r"cannot build|does not fit") as caught:
        load_model(read_checkpoint(tmp_path / "x.pt"))
    assert caught.value.exit_code == 3


def test_keys_that_do_not_fit_are_all_named(tmp_path):
    model = nanogpt()
    state = model.state_dict()
    before = load_model(ckpt(tmp_path, model))
    del state["transformer.h.1.mlp.c_fc.weight"]
    state["transformer.h.0.ln_1.weight"] = torch.ones(3)
    state["extra"] = torch.ones(2)
    state["lm_head.weight"] = state["lm_head.weight"] + 1
    torch.save({"model": state, "model_args": ARGUMENTS}, tmp_path / "ckpt.pt")
    keys = load_model(read_checkpoint(tmp_path)).keys
    assert not any(vars(before.keys).values())
    assert keys.missing == ("transformer.h.1.mlp.c_fc.weight",)
    assert keys.unexpected == ("extra",)
    assert keys.misshaped == (("transformer.h.0.ln_1.weight", (3,), (8,)),)
    assert keys.untied == (("transformer.wte.weight", "lm_head.weight"),)


def test_a_tie_survives_and_nan_equals_nan():
    model = nanogpt()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name in ("transformer.wte.weight", "lm_head.weight"):
        state[name][0, 0] = math.nan
    other = nanogpt(seed=1)
    assert fit(other, state).untied == ()
    assert other.lm_head.weight is other.transformer["wte"].weight
    assert other.lm_head.weight.isnan().sum() == 1


def test_persistent_buffers_are_filled_and_wrappers_inside_the_model_matched():
    class Wrapping(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = nn.Linear(3, 3)
            self.register_buffer("count", torch.zeros(1))

    model = Wrapping()
    keys = fit(model, {"weight": torch.ones(3, 3), "bias": torch.ones(3), "count": torch.full((1,), 4.0)})
    assert not any(vars(keys).values())
    assert model.module.weight.eq(1).all() and model.count == 4


@pytest.mark.parametrize(
    "function", ["with_config", "with_optional_config", "with_keywords", "with_nothing", "with_foreign_default"]
)
def test_functions_are_called_by_what_they_take(tmp_path, function):
    (tmp_path / "mine.py").write_text(FILE)
    model = nanogpt()
    loaded = load_model(ckpt(tmp_path, model), f"{tmp_path}/mine.py:{function}")
    assert torch.equal(loaded.module(IDS), model(IDS))
    assert (loaded.source, loaded.name, loaded.vocab_size) == ("function", "NanoGPT", 11)


@pytest.mark.parametrize("wrap", ["torch.compile", "torch.nn.DataParallel"])
def test_a_wrapped_model_is_taken_out_of_its_wrapper(tmp_path, wrap):
    """Wrappers hide the forward's signature: the mask of left padding would not reach the model."""
    made = f"import torch\ndef wrapped(config): return {wrap}(with_config(config))\n"
    (tmp_path / "mine.py").write_text(FILE + made)
    loaded = load_model(ckpt(tmp_path, nanogpt()), f"{tmp_path}/mine.py:wrapped")
    assert type(loaded.module).__name__ == "NanoGPT" and not loaded.keys.missing


def test_a_class_in_a_module_of_the_working_folder(tmp_path, monkeypatch):
    (tmp_path / "probe_test_module.py").write_text("import probe_test_sibling as s\nclass Net(s.Base): pass\n")
    (tmp_path / "probe_test_sibling.py").write_text(
        FILE
        + "\nclass Base(NanoGPT):\n"
        + "    def __init__(self, n_layer, n_head): super().__init__(n_layer, n_head, 8, 16, 11, True)\n"
    )
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    model = nanogpt()
    loaded = load_model(ckpt(tmp_path, model), "probe_test_module:Net")
    assert torch.equal(loaded.module(IDS), model(IDS)) and loaded.name == "Net"
    assert sys.path == path


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("{0}:fails", "KeyError"),
        ("{0}:leaves", "SystemExit"),
        ("{0}:with_two", "TypeError"),
        ("{0}:returns_text", "not an nn.Module"),
        ("{0}:on_meta", "meta device"),
        ("{0}:is_lazy", "no shape before the first forward"),
        ("{0}:with_confg", "did you mean with_config"),
        ("{0}:NUMBER", "no function NUMBER"),
        ("{0}", "names no function"),
        ("{0}:", "names no function"),
        ("nowhere.py:f", "no such file"),
        ("no_such_module_here:f", "ModuleNotFoundError"),
        ("{1}:f", "SyntaxError"),
    ],
)
def test_errors_of_a_users_function(tmp_path, spec, said):
    (tmp_path / "mine.py").write_text(FILE)
    (tmp_path / "broken.py").write_text("def f(:\n")
    with pytest.raises(ProbeError, match=said) as caught:
        load_model(ckpt(tmp_path, nanogpt()), spec.format(tmp_path / "mine.py", tmp_path / "broken.py"))
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    ("rename", "words"),
    [
        (lambda name: name, ()),
        (lambda name: f"model.{name}", ("prefix 'model.' removed",)),
        (lambda name: name.removeprefix("transformer."), ("prefix 'transformer.' added",)),
        (lambda name: f"net.gpt.{name}", ("prefix 'net.gpt.' removed",)),
    ],
)
def test_common_prefixes_are_repaired_and_reported(tmp_path, rename, words):
    (tmp_path / "mine.py").write_text(FILE)
    model = nanogpt()
    torch.save({rename(name): tensor for name, tensor in model.state_dict().items()}, tmp_path / "w.pt")
    loaded = load_model(read_checkpoint(tmp_path / "w.pt"), f"{tmp_path}/mine.py:with_nothing")
    assert loaded.keys.renamed == words
    assert not loaded.keys.missing and not loaded.keys.unexpected
    assert torch.equal(loaded.module(IDS), model(IDS))


def test_another_architecture_is_refused(tmp_path):
    (tmp_path / "mine.py").write_text(FILE)
    other = Decoder(DecoderConfig(**SIZES))
    torch.save(other.state_dict(), tmp_path / "w.pt")
    with pytest.raises(ProbeError, match="does not fit NanoGPT") as caught:
        load_model(read_checkpoint(tmp_path / "w.pt"), f"{tmp_path}/mine.py:with_nothing")
    assert "transformer.h.0.attn.c_attn.weight" in caught.value.why and "blocks.0" in caught.value.why


def test_what_the_file_lacks_is_the_same_every_time(tmp_path):
    tensors = nanogpt().state_dict()
    del tensors["transformer.h.0.mlp.c_fc.weight"]
    checkpoint = Checkpoint(tmp_path, "plain", tensors, config=ARGUMENTS)
    first = load_model(checkpoint)
    torch.manual_seed(99)
    second = load_model(checkpoint)
    assert torch.equal(first.module(IDS), second.module(IDS))
