"""transformers architectures: as the library itself would load them, and honest about keys that do not fit."""

import json
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from stability_probe.checkpoints import read_checkpoint
from stability_probe.errors import ProbeError
from stability_probe.models import load_model

transformers = pytest.importorskip("transformers")

BASE = {"vocab_size": 31, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
BASE |= {"intermediate_size": 24, "max_position_embeddings": 32}
GROUPED = BASE | {"num_key_value_heads": 2}
LLAMA3_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3_ROPE |= {"original_max_position_embeddings": 16, "rope_theta": 10000.0}

CONFIGS = {
    "gpt2": lambda: transformers.GPT2Config(vocab_size=31, n_embd=16, n_layer=2, n_head=4, n_positions=32),
    "llama": lambda: transformers.LlamaConfig(**GROUPED),
    "llama-tied": lambda: transformers.LlamaConfig(**GROUPED, tie_word_embeddings=True),
    "llama-3-rope": lambda: transformers.LlamaConfig(**GROUPED, rope_scaling=dict(LLAMA3_ROPE)),
    "qwen3": lambda: transformers.Qwen3Config(**GROUPED, head_dim=4),
    "gemma2": lambda: transformers.Gemma2Config(**GROUPED, head_dim=4, sliding_window=4),
    "gpt-neox": lambda: transformers.GPTNeoXConfig(**BASE),
    "mixtral": lambda: transformers.MixtralConfig(**GROUPED, num_local_experts=4),
}
IDS = torch.randint(0, 31, (2, 12), generator=torch.Generator().manual_seed(3))


def saved(folder, name, dtype=torch.float32):
    """A folder of `save_pretrained` with random weights."""
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]()).to(dtype)
    model.save_pretrained(folder)
    return folder


def edited(folder, **changes):
    """Tensors of the folder replaced (None: taken out)."""
    tensors = load_file(folder / "model.safetensors") | changes
    kept = {name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def reconfigured(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def load(folder):
    return load_model(read_checkpoint(folder))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_logits_are_the_librarys_own_bit_for_bit(tmp_path, name, dtype):
    loaded = load(saved(tmp_path, name, dtype))
    attention = loaded.module.config._attn_implementation
    assert attention == ("eager" if name == "gemma2" else "sdpa")
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation=attention
    ).eval()
    with torch.no_grad():
        assert torch.equal(loaded.module(IDS).logits, reference(IDS).logits)
    for (ours, mine), (theirs, other) in zip(loaded.module.named_buffers(), reference.named_buffers(), strict=True):
        assert ours == theirs and torch.equal(mine, other)  # rotary frequencies are stored in no file
    assert not any(vars(loaded.keys).values())
    assert (loaded.source, loaded.vocab_size) == ("transformers", 31)


def test_the_module_is_ready_for_a_replay(tmp_path):
    module = load(saved(tmp_path, "gpt2", torch.bfloat16)).module
    assert not module.training and not module.config.use_cache
    assert all(p.dtype == torch.float32 and p.requires_grad and p.grad is None for p in module.parameters())
    assert module.lm_head.weight is module.transformer.wte.weight
    module(IDS).logits.sum().backward()
    assert all(p.grad is not None for p in module.parameters())


def test_gradients_reach_the_experts(tmp_path):
    module = load(saved(tmp_path, "mixtral")).module
    module(IDS).logits.logsumexp(-1).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())


def test_missing_and_unexpected_keys_are_named(tmp_path):
    gone = "model.layers.1.mlp.up_proj.weight"
    folder = edited(saved(tmp_path, "llama"), **{gone: None, "model.extra.weight": torch.ones(2)})
    first = load(folder)
    torch.manual_seed(99)
    second = load(folder)
    assert first.keys.missing == (gone,) and first.keys.unexpected == ("model.extra.weight",)
    filled = first.module.get_parameter(gone)
    assert filled.isfinite().all() and 0 < filled.std() < 0.1  # the library's initial values…
    assert torch.equal(filled, second.module.get_parameter(gone))  # …from a fixed seed


def test_loading_leaves_the_callers_random_numbers_alone(tmp_path):
    saved(tmp_path, "llama")
    torch.manual_seed(11)
    want = torch.rand(3)
    torch.manual_seed(11)
    load(tmp_path)
    assert torch.equal(torch.rand(3), want)


def test_a_lost_head_is_missing_only_where_it_is_not_tied(tmp_path):
    tied = load(saved(tmp_path / "tied", "llama-tied"))
    assert not tied.keys.missing and tied.module.lm_head.weight is tied.module.model.embed_tokens.weight
    lost = load(edited(saved(tmp_path / "untied", "llama"), **{"lm_head.weight": None}))
    assert lost.keys.missing == ("lm_head.weight",)


def test_a_broken_tie_is_named(tmp_path):
    folder = saved(tmp_path, "llama-tied")
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    same = load(edited(folder, **{"lm_head.weight": embedding.clone()}))
    assert not same.keys.untied
    loaded = load(edited(folder, **{"lm_head.weight": embedding + 1}))
    assert loaded.keys.untied == (("model.embed_tokens.weight", "lm_head.weight"),)
    assert torch.equal(loaded.module.lm_head.weight, embedding + 1)  # both as stored
    assert torch.equal(loaded.module.model.embed_tokens.weight, embedding)


def test_a_tensor_of_another_shape_is_named(tmp_path):
    loaded = load(edited(saved(tmp_path, "llama"), **{"model.norm.weight": torch.ones(7)}))
    assert loaded.keys.misshaped == (("model.norm.weight", (7,), (16,)),)
    assert loaded.module(IDS).logits.isfinite().all()


def test_weights_under_a_wrappers_name(tmp_path):
    folder = saved(tmp_path, "llama")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save({f"net.{name}": tensor for name, tensor in tensors.items()}, folder / "pytorch_model.bin")
    loaded = load(folder)
    assert loaded.keys.renamed == ("prefix 'net.' removed",) and not loaded.keys.missing


def test_another_architecture_is_refused(tmp_path):
    gpt2, llama = saved(tmp_path / "a", "gpt2"), saved(tmp_path / "b", "llama")
    with pytest.raises(ProbeError, match="does not fit LlamaForCausalLM") as caught:
        load_model(read_checkpoint(gpt2, config=llama))
    assert caught.value.exit_code == 3
    assert "model.embed_tokens.weight" in caught.value.why and "transformer.h.0.attn.c_attn.bias" in caught.value.why


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "lama"}, "llama"),
        ({"model_type": "mine", "auto_map": {"AutoModelForCausalLM": "modeling.Mine"}}, "never run"),
        ({"model_type": "vit"}, "no language model"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantized"),
        ({"hidden_size": 17}, "refuses"),
        ({"hidden_size": "wide"}, "refuses"),
        ({"vocab_size": -5}, "refuses"),
        ({"hidden_act": "nonsense"}, "refuses"),
    ],
)
def test_configurations_that_make_no_model(tmp_path, changes, said):
    with pytest.raises(ProbeError, match=said) as caught:
        load(reconfigured(saved(tmp_path, "llama"), **changes))
    assert caught.value.exit_code == 3


def test_code_named_by_the_configuration_is_not_run(tmp_path):
    trace = tmp_path / "trace"
    folder = saved(tmp_path / "ckpt", "llama")
    (folder / "modeling_evil.py").write_text(f"open({str(trace)!r}, 'w')")
    (folder / "configuration_evil.py").write_text(f"open({str(trace)!r}, 'w')")
    hub = {"_attn_implementation": "evil/kernel", "attn_implementation": "evil/kernel"}
    auto = {"AutoConfig": "configuration_evil.Evil", "AutoModelForCausalLM": "modeling_evil.Evil"}
    loaded = load(reconfigured(folder, auto_map=auto, **hub))
    assert loaded.module.config._attn_implementation == "sdpa" and not trace.exists()


def test_names_of_classes_are_not_made(tmp_path):
    """One for each of `num_labels`: a configuration could ask for 10⁹."""
    loaded = load(reconfigured(saved(tmp_path, "llama"), num_labels=5000))
    assert len(loaded.module.config.id2label) < 5000


def test_without_the_library_the_error_says_what_to_install(tmp_path, monkeypatch):
    checkpoint = read_checkpoint(saved(tmp_path, "llama"))
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ProbeError, match=r"stability-probe\[hf\]"):
        load_model(checkpoint)


def test_a_checkpoint_that_does_not_say_what_it_is(tmp_path):
    torch.save({"w": torch.ones(2)}, tmp_path / "w.pt")
    with pytest.raises(ProbeError, match="no configuration"):
        load_model(read_checkpoint(tmp_path / "w.pt"))
    torch.save({"model": {"w": torch.ones(2)}, "config": {"lr": 1}}, tmp_path / "w.pt")
    with pytest.raises(ProbeError, match="no model_type"):
        load_model(read_checkpoint(tmp_path / "w.pt"))
