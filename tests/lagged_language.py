"""A language in which each token follows from the one LAG positions before it: learned in seconds, by attention alone.

A model that knows it depends on positions, on its heads, and on a stream that carries what they found: faults in
these cost nats, where a model of ordinary text this small would hardly notice.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stability_probe.models.decoder import Decoder, DecoderConfig

VOCABULARY, LAG, LENGTH, SURE = 60, 5, 64, 0.9
CONFIG = DecoderConfig(
    vocab_size=VOCABULARY, n_layer=4, n_head=2, d_model=48, d_ff=96, max_positions=256, positions="rotary",
    norm="rmsnorm", mlp="swiglu", hyper_streams=2, tied=False,
)  # fmt: skip
LR = 3e-3


def sequences(rows: int, length: int = LENGTH, seed: int = 0) -> Tensor:
    """(rows, length): token t is a fixed permutation of token t − LAG, nine times out of ten."""
    generator = torch.Generator().manual_seed(seed)
    follows = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(7))
    ids_BT = torch.randint(VOCABULARY, (rows, length), generator=generator)
    sure_BT = torch.rand(rows, length, generator=generator) < SURE
    for t in range(LAG, length):
        ids_BT[:, t] = torch.where(sure_BT[:, t], follows[ids_BT[:, t - LAG]], ids_BT[:, t])
    return ids_BT


def logits_of(model: nn.Module, ids_BT: Tensor) -> Tensor:
    output = model(ids_BT)
    return output if isinstance(output, Tensor) else output.logits


def trained(model: nn.Module, steps: int, lr: float = LR) -> tuple[torch.optim.AdamW, list[dict[str, float]]]:
    """Train in place; the optimizer and the log."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    log = []
    for step in range(steps):
        rate = lr * min(1.0, (step + 1) / 20, 2 * (steps - step) / steps)
        for group in optimizer.param_groups:
            group["lr"] = rate
        ids_BT = sequences(16, seed=1000 + step)
        loss = F.cross_entropy(logits_of(model, ids_BT)[:, :-1].flatten(0, 1), ids_BT[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        log.append({"step": step, "loss": loss.item(), "grad_norm": norm.item(), "learning_rate": rate})
    return optimizer, log


def decoder(config: DecoderConfig = CONFIG) -> Decoder:
    """The untrained decoder with weights of about one over the root of the width, from which it learns fast."""
    torch.manual_seed(0)
    model = Decoder(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and "stream" not in name:
            nn.init.normal_(parameter, std=0.05 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.14)
    return model


def save_decoder(
    path: Path, model: Decoder, optimizer: dict[str, Any] | None = None, step: int = 400, **config: Any
) -> Path:
    """A checkpoint that needs no `--model`; `config` overrides settings, as a wrong configuration would."""
    stored = dataclasses.replace(model.config, **config).to_dict()
    content = {"model": model.state_dict(), "config": stored, "step": step}
    torch.save(content if optimizer is None else {**content, "optimizer": optimizer}, path)
    return path


def save_log(path: Path, log: list[dict[str, float]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in log))
    return path


def save_batch(path: Path, ids_BT: Tensor, **more: Tensor) -> Path:
    torch.save({"input_ids": ids_BT, "labels": ids_BT.clone(), **more}, path)
    return path


_SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 24, "max_position_embeddings": 256,
    "num_local_experts": 4, "num_experts_per_tok": 1, "tie_word_embeddings": False, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None, "dtype": "float32",
}  # fmt: skip
MIXTRAL = {"model_type": "mixtral", **_SMALL}
GPT_OSS = {"model_type": "gpt_oss", **_SMALL, "layer_types": ["full_attention"] * 2, "rope_scaling": None}


def experts(config: dict[str, Any] = GPT_OSS) -> Any:
    """An untrained model of four experts per layer, one of which is chosen."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), attn_implementation="eager")
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            nn.init.normal_(parameter, std=0.1)
    return model


def cached(name: str, model: nn.Module, steps: int) -> tuple[nn.Module, dict[str, Any], list[dict[str, float]]]:
    """The trained model, its optimizer's state and its log; trained once per machine and version of what makes it."""
    from filelock import FileLock

    code = "".join(inspect.getsource(made) for made in (sequences, trained, decoder, experts))
    key = hashlib.sha256(f"{code}{CONFIG}{GPT_OSS}{LAG}{LENGTH}{SURE}{LR}{steps}".encode()).hexdigest()[:12]
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stability_probe" / "lagged"
    root.mkdir(parents=True, exist_ok=True)
    path = root / f"{name}-{key}.pt"
    with FileLock(f"{path}.lock"):
        if not path.exists():
            optimizer, log = trained(model, steps)
            part = path.with_suffix(".part")
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "log": log}, part)
            part.rename(path)
    stored = torch.load(path, weights_only=True)
    model.load_state_dict(stored["model"])
    return model.eval(), stored["optimizer"], stored["log"]
