"""Changes that are made in memory, replayed, and undone. One file is one kind of change.

A rule's `Plan` names the module and gives its arguments:

drop_rows (rows: list[int]): the rows leave the batch; no new forward, since per-row results are known.
realign_labels (offset: int, rows: list[int]): targets moved `offset` positions further into the future (the
    k of `offset_losses` that is lowest), in these rows only; in all without rows.
ignore_targets (spans: list[(row, start, end)]): targets that sit at these positions of the row leave the
    loss (position p is the target of p − 1).
swap_baseline (): the baseline batch in place of this one: the batch's whole excess goes, whatever its cause.
clip_heads (gammas: {(layer, head): factor}): that head's logits × factor, through its rows of W_q and W_k
    (W_q alone under grouped-query attention).
clip_gains (gammas: {layer: factor}): q_norm and k_norm gains of the layer, each × √factor.
centre_head (module: str, precision: str): what all rows of the head share, taken out of them.
recentre_logits (precision: str): log Z subtracted from the logits before they are rounded.
replace_elements (parameter: str, indices: list[tuple]): those elements set to the tensor's median.
rescale_tensor (parameter: str, factor: float): the whole tensor × factor.
replace_rows (parameter: str, rows: list[int]): those rows rescaled to the median row norm; a zero row becomes
    the mean row.
retie (parameter: str, source: str): the parameter becomes a copy of the source.
clamp_channel (module: str, channel: int | None, limit: float): that channel (or all) of its output clamped to ±limit.
clamp_largest_input (module: str): the largest channel of its input held to the median channel's largest.
change_precision (precision: str, modules: list[str]): replay in another precision; with modules, only those
    in fp32.
simulated_step (refresh: list[str], lr_factor: float): the AdamW step with v̂ := max(v̂, g²) in those
    parameters, or at another LR.
simulated_progress (in_fp32: bool, tiny_eps: bool): the gain that the AdamW step still loses with its weights in
    fp32, or with ε far below √v̂.
rescale_logits (factor: float): all attention logits × factor, in any model that calls softmax or SDPA.
cap_logits (cap: float, where: "output" or "attention", remove: bool): those logits soft-capped, or the cap undone.
unmask_queries (rows: list[int]): a query that sees no key sees itself; in these rows all tokens count as real.
set_positions (): positions 0 … T−1 from the first real token on.
change_rotary (theta: float, stretch: float, layout: "halves" or "pairs"): another rotary base, positions divided by
    another factor, or the query and key weights in the other order of pairs.
rescale_tensors (factors: {parameter: factor}): each of those tensors × its factor.
constrain_mixing (parameters: list[str], how: "sinkhorn" or "norm"): those mixing matrices made doubly stochastic,
    or divided by their spectral norm.
recentre_router (modules: list[str], limit: float): those routers without what all tokens share, or with their
    logits held within the limit.
"""
