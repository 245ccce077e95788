"""A healthy little model in tables: what the rules' cases change one thing in.

Four blocks of four heads, width 64, a vocabulary of 1 000, four rows of 128 tokens, loss 3.4 nats.
"""

from __future__ import annotations

from typing import Any

from stability_probe.rules._tables import Record

LAYERS, HEADS, WIDTH, VOCAB, ROWS, LENGTH = 4, 4, 64, 1000, 4, 128
NAN = float("nan")

Changes = dict[Any, dict[str, Any]]


def _merge(table: list[Record], keys: list[Any], changes: Changes | None) -> list[Record]:
    unknown = set(changes or {}) - set(keys)
    if unknown:
        raise KeyError(f"the healthy model has no {sorted(map(str, unknown))}")
    return [{**row, **(changes or {}).get(key, {})} for row, key in zip(table, keys, strict=True)]


def heads(changes: Changes | None = None) -> list[Record]:
    """The heads table; `changes` by (layer, head)."""
    keys = [(layer, head) for layer in range(LAYERS) for head in range(HEADS)]
    table = [
        {
            "module": f"model.layers.{layer}.self_attn", "layer": layer, "head": head,
            "max_logit": 6.0 + 2.0 * ((layer + head) % 4), "row": 0, "query": 90, "key": 3,
            "entropy": 1.6 + 0.3 * ((layer + head) % 4), "top_weight": 0.4, "top_key_share": 0.5,
            "baseline_max_logit": NAN, "baseline_entropy": NAN,
        }
        for layer, head in keys
    ]  # fmt: skip
    return _merge(table, keys, changes)


def _parameter(name: str, layer: int, shape: tuple[int, ...], **values: Any) -> Record:
    numel = 1
    for size in shape:
        numel *= size
    return {
        "parameter": name, "kind": name.replace(f".{layer}.", ".*."), "layer": layer, "shape": shape, "numel": numel,
        "rms": 0.05, "mean": 0.0, "std": 0.05, "absmax": 0.25, "absmax_index": (0,) * len(shape),
        "median_abs": 0.034, "median": 0.0, "outlier_count": 0, "outlier_indices": [], "nonfinite": 0,
        "first_nonfinite_index": None, "constant": NAN, "norm_gain": False, "qk_gain": "",
        "grad_norm": 0.1, "grad_absmax": 0.01, "grad_nonfinite": 0, "gap_bf16": 0.01, "baseline_grad_norm": NAN,
        "update_rms": NAN, "update_ratio": NAN, "g2_over_v": NAN, "eps_share": NAN, "impossible_share": NAN,
        **values,
    }  # fmt: skip


_GAIN = {
    "rms": 0.9, "mean": 0.88, "std": 0.15, "absmax": 1.4, "median_abs": 0.88, "median": 0.88, "norm_gain": True,
}  # fmt: skip
_MATRICES = {
    "self_attn.q_proj": (WIDTH, WIDTH), "self_attn.k_proj": (WIDTH, WIDTH), "self_attn.v_proj": (WIDTH, WIDTH),
    "self_attn.o_proj": (WIDTH, WIDTH), "mlp.gate_proj": (4 * WIDTH, WIDTH), "mlp.up_proj": (4 * WIDTH, WIDTH),
    "mlp.down_proj": (WIDTH, 4 * WIDTH),
}  # fmt: skip


def parameters(changes: Changes | None = None, qk_norm: bool = False, everywhere: Record | None = None) -> list[Record]:
    """The parameters table; `changes` by name, `everywhere` in all of them."""
    table = [_parameter("model.embed_tokens.weight", -1, (VOCAB, WIDTH))]
    for layer in range(LAYERS):
        block = f"model.layers.{layer}"
        table += [_parameter(f"{block}.{name}.weight", layer, shape) for name, shape in _MATRICES.items()]
        table += [
            _parameter(f"{block}.{name}.weight", layer, (WIDTH,), **_GAIN)
            for name in ("input_layernorm", "post_attention_layernorm")
        ]
        if qk_norm:
            table += [
                _parameter(f"{block}.self_attn.{which}_norm.weight", layer, (WIDTH // HEADS,), **_GAIN, qk_gain=which)
                for which in ("q", "k")
            ]
    table += [
        _parameter("model.norm.weight", -1, (WIDTH,), **_GAIN),
        _parameter("lm_head.weight", -1, (VOCAB, WIDTH)),
    ]
    table = [{**row, **(everywhere or {})} for row in table]
    return _merge(table, [row["parameter"] for row in table], changes)


def _module(name: str, role: str, layer: int, **values: Any) -> Record:
    return {
        "module": name, "role": role, "layer": layer, "rms": 1.0, "absmax": 8.0, "nonfinite": 0, "outside_fp16": 0.0,
        "channel": 5, "row": 0, "position": 40, "grad_norm": NAN, "grad_absmax": NAN, "grad_nonfinite": NAN,
        "gap_bf16": 0.008, "baseline_rms": NAN, "baseline_absmax": NAN, **values,
    }  # fmt: skip


def modules(changes: Changes | None = None, everywhere: Record | None = None) -> list[Record]:
    """The modules table in execution order; `changes` by name, `everywhere` in all of them."""
    table = [_module("model.embed_tokens", "embedding", -1)]
    for layer in range(LAYERS):
        block = f"model.layers.{layer}"
        table += [
            _module(f"{block}.input_layernorm", "norm", layer, channel=9 + layer),
            _module(f"{block}.self_attn", "attention", layer, channel=17 + layer),
            _module(f"{block}.mlp.down_proj", "linear", layer, channel=25 + layer),
            _module(f"{block}.mlp", "mlp", layer, channel=25 + layer),
            _module(block, "block", layer, channel=33 + layer, grad_norm=0.2, grad_absmax=0.01, grad_nonfinite=0),
        ]
    table += [_module("model.norm", "norm", -1), _module("lm_head", "head", -1)]
    table = [{**row, **(everywhere or {})} for row in table]
    return _merge(table, [row["module"] for row in table], changes)


def rows(changes: Changes | None = None, count: int = ROWS) -> list[Record]:
    """The rows table; `changes` by row."""
    table = [
        {
            "row": row, "loss": 3.3 + 0.1 * (row % 3), "valid_targets": LENGTH - 1, "tokens": LENGTH,
            "grad_norm": 0.3, "cosine": 0.4, "audit_score": 0.05, "flags": [], "spans": [], "reason": "",
        }
        for row in range(count)
    ]  # fmt: skip
    merged = _merge(table, list(range(count)), changes)
    # Inside a span the loss is the row's, unless the case says otherwise.
    return [
        {"span_losses": [(row["loss"], int(end) - int(start)) for start, end, *_ in row["spans"]], **row}
        for row in merged
    ]
