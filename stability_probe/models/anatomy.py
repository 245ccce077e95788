"""Where a decoder keeps its parts: blocks, attention, projections of each head, norms, embedding, head.

Found from structure and from the field's usual names, so that it serves transformers' classes, the
package's own decoder and anyone's own class alike. What cannot be found is None, and the report says less.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

ATTENTION = re.compile(r"(^|_)(self_?attn|attn|attention|self_attention|mixer)$", re.IGNORECASE)
MLP = re.compile(r"(^|_)(mlp|ffn|ff|feed_?forward|moe|block_sparse_moe|experts)$", re.IGNORECASE)
NORM = re.compile(r"norm", re.IGNORECASE)
QUERY = ("q_proj", "q_b_proj", "query", "wq", "w_q", "Wq", "W_q", "to_q", "q_lin", "q")
KEY = ("k_proj", "key", "wk", "w_k", "Wk", "W_k", "to_k", "k_lin", "k")
QUERY_NORM = ("q_norm", "q_layernorm", "query_norm", "norm_q", "ln_q", "q_ln")
KEY_NORM = ("k_norm", "k_layernorm", "key_norm", "norm_k", "ln_k", "k_ln")
FUSED = ("c_attn", "qkv_proj", "qkv", "query_key_value", "Wqkv", "in_proj", "wqkv", "W_pack")
# Makes the keys' content parts (and the values) of all heads from one latent vector.
LATENT_KEY = "kv_b_proj"
# GPT-NeoX and Bloom interleave q, k and v inside each head; the others stack all q, then all k, then all v.
INTERLEAVED = ("query_key_value",)


@dataclass(frozen=True)
class HeadRows:
    """The rows (output features) of one parameter that produce one head's queries or keys.

    Attributes:
        parameter: name of the weight; `bias` that of its bias, or None.
        transposed: True for Conv1D weights, stored (in, out).
    """

    parameter: str
    bias: str | None
    start: int
    stop: int
    transposed: bool

    def of(self, tensor: Tensor) -> Tensor:
        """The view of `tensor` (the weight or the bias) that holds these output features."""
        if tensor.dim() == 2 and self.transposed:
            return tensor[:, self.start : self.stop]
        return tensor[self.start : self.stop]


@dataclass(frozen=True)
class Attention:
    """One attention module. `heads` and `kv_heads` may be None where the class does not say."""

    name: str
    layer: int
    n_heads: int | None
    n_kv_heads: int | None
    head_width: int | None
    query: str | None
    key: str | None
    fused: str | None
    query_norm: str | None
    key_norm: str | None


@dataclass(frozen=True)
class Anatomy:
    """Names of the parts, as in `named_modules()`."""

    blocks: tuple[str, ...]
    attention: tuple[Attention, ...]
    mlps: tuple[str, ...]
    norms: tuple[str, ...]
    embeddings: tuple[str, ...]
    head: str | None
    final_norm: str | None

    def layer_of(self, name: str) -> int:
        """Index of the block that holds this module or parameter; −1 outside blocks."""
        for layer, block in enumerate(self.blocks):
            if name == block or name.startswith(block + "."):
                return layer
        return -1

    def role_of(self, name: str) -> str:
        """The role of a module, one of the words of `Measurements.modules`."""
        if name in self.blocks:
            return "block"
        if any(name == site.name for site in self.attention):
            return "attention"
        for role, names in (("mlp", self.mlps), ("norm", self.norms), ("embedding", self.embeddings)):
            if name in names:
                return role
        return "head" if name == self.head else "linear"

    def kind_of(self, name: str) -> str:
        """The name with the block's index replaced by "*": siblings in other layers share it."""
        layer = self.layer_of(name)
        if layer < 0:
            return name
        block = self.blocks[layer]
        stem = block.rsplit(".", 1)[0] if "." in block else block
        return f"{stem}.*{name[len(block) :]}"


def dissect(module: nn.Module) -> Anatomy:
    """Find the parts of a decoder."""
    names = {name: part for name, part in module.named_modules() if name}
    blocks = _blocks(module)
    attention = tuple(_attention_sites(module, blocks))
    mlps = tuple(name for name in names if MLP.search(_leaf(name)) and _inside(name, blocks) and not _nested_mlp(name))
    norms = tuple(name for name, part in names.items() if _is_norm(part))
    embeddings = tuple(name for name, part in names.items() if isinstance(part, nn.Embedding))
    head = _head(module, names, blocks)
    outside = [name for name in norms if not _inside(name, blocks)]
    return Anatomy(blocks, attention, mlps, norms, embeddings, head, outside[-1] if outside else None)


def with_heads(module: nn.Module, site: Attention, n_heads: int) -> Attention:
    """The site completed by the number of heads that its attention calls showed, where the class does not tell it."""
    if site.n_heads is not None and site.head_width is not None:
        return site
    width = _head_width(module, nn.Module(), site.query, site.fused, n_heads, n_heads)
    keys = module.get_parameter(f"{site.key}.weight").shape[0] if site.key else None
    n_kv = keys // width if keys and width and keys % width == 0 else n_heads
    return dataclasses.replace(site, n_heads=n_heads, n_kv_heads=site.n_kv_heads or n_kv, head_width=width)


def head_rows(module: nn.Module, site: Attention, head: int, side: str) -> HeadRows | None:
    """The rows of W_q (side "q") or W_k (side "k") that make this query head's logits.

    Under grouped-query attention side "k" gives the rows of the key head that the query head shares.
    None where the layout of the projection is not known.
    """
    if site.n_heads is None or site.head_width is None:
        return None
    n_kv = site.n_kv_heads or site.n_heads
    width = site.head_width
    index = head if side == "q" else head * n_kv // site.n_heads
    owner = site.query if side == "q" else site.key
    if owner is not None:
        start = index * width
    elif site.fused is not None:
        owner = site.fused
        start = _fused_start(owner, side, index, site.n_heads, n_kv, width)
    else:
        return None
    projection = module.get_submodule(owner)
    weight = module.get_parameter(f"{owner}.weight")
    transposed = type(projection).__name__ == "Conv1D"
    if start + width > weight.shape[1 if transposed else 0]:
        return None
    return _rows_of(module, owner, start, start + width, transposed)


def latent_head_rows(module: nn.Module, site: Attention, head: int) -> tuple[tuple[HeadRows, float], ...]:
    """One head's rows under multi-head latent attention, each with the power of a factor on the head's logits.

    A logit is q_c · k_c + q_r · k_r, where all heads share the rotary key k_r. So the content parts q_c and k_c take
    the root of the factor each, the head's rotary query q_r all of it, and k_r stays as it is (Kimi K2 report, 2025,
    section 2.1). Empty where the attention has no latent keys.
    """
    part = module.get_submodule(site.name)
    content, rotary, value = (
        _integer((part,), (name,)) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    keys = f"{site.name}.{LATENT_KEY}"
    if not (content and rotary and value and site.query and isinstance(getattr(part, LATENT_KEY, None), nn.Linear)):
        return ()
    query, key = head * (content + rotary), head * (content + value)
    return (
        (_rows_of(module, site.query, query, query + content), 0.5),
        (_rows_of(module, site.query, query + content, query + content + rotary), 1.0),
        (_rows_of(module, keys, key, key + content), 0.5),
    )


def _rows_of(module: nn.Module, owner: str, start: int, stop: int, transposed: bool = False) -> HeadRows:
    bias = f"{owner}.bias" if getattr(module.get_submodule(owner), "bias", None) is not None else None
    return HeadRows(f"{owner}.weight", bias, start, stop, transposed)


def _fused_start(owner: str, side: str, index: int, n_heads: int, n_kv: int, width: int) -> int:
    if _leaf(owner) in INTERLEAVED and n_heads == n_kv:
        return (3 * index + (0 if side == "q" else 1)) * width
    return index * width if side == "q" else (n_heads + index) * width


def _leaf(name: str) -> str:
    return name.rsplit(".", 1)[-1]


def _inside(name: str, blocks: tuple[str, ...]) -> bool:
    return any(name.startswith(block + ".") for block in blocks)


def _nested_mlp(name: str) -> bool:
    return any(MLP.search(part) for part in name.split(".")[:-1])


def _is_norm(part: nn.Module) -> bool:
    return bool(NORM.search(type(part).__name__)) and not any(True for _ in part.children())


def _blocks(module: nn.Module) -> tuple[str, ...]:
    """The longest list of sibling modules that share a class and hold parameters; outermost on a tie."""
    best: tuple[str, ...] = ()
    for name, part in module.named_modules():
        if not isinstance(part, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
            continue
        children = [(key, child) for key, child in part.named_children() if any(True for _ in child.parameters())]
        same_class = len({type(child) for _, child in children}) == 1
        composite = all(any(True for _ in child.children()) for _, child in children)
        if children and same_class and composite and len(children) > len(best):
            best = tuple(f"{name}.{key}" if name else key for key, _ in children)
    return best


def _attention_sites(module: nn.Module, blocks: tuple[str, ...]) -> Iterator[Attention]:
    for layer, block in enumerate(blocks):
        for name, part in module.get_submodule(block).named_modules():
            looks = ATTENTION.search(_leaf(name)) or (name and "attention" in type(part).__name__.lower())
            if not looks or _is_norm(part):
                continue
            site = _site(module, f"{block}.{name}", part, layer)
            if site is not None:
                yield site
                break
        else:
            # Attention by another name, or written into the block itself: its calls are still seen there.
            whole = _site(module, block, module.get_submodule(block), layer)
            yield whole or Attention(block, layer, None, None, None, None, None, None, None, None)


def _site(module: nn.Module, name: str, part: nn.Module, layer: int) -> Attention | None:
    """Describe an attention module; None where it holds no projections (a wrapper, or a dropout)."""

    def find(wanted: tuple[str, ...]) -> str | None:
        for sub, child in part.named_modules():
            if _leaf(sub) in wanted and any(True for _ in child.parameters()):
                return f"{name}.{sub}"
        return None

    query, key, fused = find(QUERY), find(KEY), find(FUSED)
    if query is None and fused is None:
        return None
    heads, kv_heads = _head_counts(module, part)
    width = _head_width(module, part, query, fused, heads, kv_heads)
    return Attention(name, layer, heads, kv_heads, width, query, key, fused, find(QUERY_NORM), find(KEY_NORM))


def _integer(owners: tuple[object, ...], wanted: tuple[str, ...]) -> int | None:
    for owner in owners:
        for attribute in wanted:
            value = getattr(owner, attribute, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def _head_counts(module: nn.Module, part: nn.Module) -> tuple[int | None, int | None]:
    owners = (part, getattr(part, "config", None), getattr(module, "config", None))
    heads = _integer(owners, ("num_attention_heads", "num_heads", "n_heads", "n_head", "nheads", "heads"))
    kv_heads = _integer(owners, ("num_key_value_heads", "n_kv_heads", "n_kv_head", "num_kv_heads", "kv_heads"))
    return heads, kv_heads or heads


def _head_width(
    module: nn.Module, part: nn.Module, query: str | None, fused: str | None, heads: int | None, kv_heads: int | None
) -> int | None:
    owners = (part, getattr(part, "config", None))
    stated = _integer(owners, ("head_dim", "head_size", "d_head", "head_width", "hd"))
    if stated is not None or heads is None:
        return stated
    projection = module.get_submodule(query or fused or "")
    weight = getattr(projection, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        return None
    features = weight.shape[1 if type(projection).__name__ == "Conv1D" else 0]
    parts = heads if query else heads + 2 * (kv_heads or heads)
    return features // parts if features % parts == 0 else None


def _head(module: nn.Module, names: dict[str, nn.Module], blocks: tuple[str, ...]) -> str | None:
    getter = getattr(module, "get_output_embeddings", None)
    if callable(getter):
        found = getter()
        for name, part in names.items():
            if part is found:
                return name
    linears = [n for n, p in names.items() if isinstance(p, nn.Linear) and not _inside(n, blocks)]
    return linears[-1] if linears else None
