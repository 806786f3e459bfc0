"""Block-sparse decode attention over device slots or pages, with the eviction score as a bias (paper section 3).

out = softmax(q . k / sqrt(D) + beta) . v over the tokens of the selected blocks. The bias is added after the scaling,
in natural-log units. The log-sum-exp is returned too, so that parts computed apart can be merged exactly.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nosa_sys.errors import ConfigError
from nosa_sys.kernels.numerics import acc_dtype


def sparse_decode_attention(
    q: Tensor,
    slots: Tensor,
    slot_betas: Tensor | None,
    slot_rows: Tensor | None,
    block_ids: Tensor,
    lengths: Tensor,
    page_table: Tensor | None = None,
    counts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend to the selected blocks of each (sequence, KV head).

    q [batch, q_head, head_dim] roped; slots [slot_row, 2, block, head_dim]; slot_betas [slot_row, block] or None;
    slot_rows int64 and block_ids int32 [batch, kv_head, k], -1 in either skips the entry; lengths [batch], context
    tokens. Token ``offset`` of a block is valid when block_id * block + offset < length. A block id given twice is
    attended once. Invalid tokens and slots that are not named may hold anything, NaN included.
    With ``page_table`` int64 or int32 [batch, block] (``slot_rows`` is None then) the rows are those of pages that all
    heads share: see ``rows_of_pages``. Exactly one of the two is given, else ConfigError. With ``counts`` int32
    [batch * kv_head] only so many first entries of each list are looked at.
    Returns out [batch, q_head, head_dim] in q's type and lse [batch, q_head] in float32 (float64 for float64); a row
    without a valid token gives zeros and -inf. Differentiable in q, slots and slot_betas.
    """
    slot_rows = slots_or_pages(slot_rows, page_table)
    if counts is not None:
        listed = torch.arange(block_ids.shape[2], device=q.device) < counts.view(block_ids.shape[:2])[..., None]
        block_ids = torch.where(listed, block_ids, -1)
    if page_table is not None:
        slot_rows = rows_of_pages(page_table, block_ids)
    dtype = acc_dtype(q, slots)
    batch, n_q_heads, head_dim = q.shape
    n_kv_heads, block_size = slot_rows.shape[1], slots.shape[2]
    group = n_q_heads // n_kv_heads

    used = (slot_rows >= 0) & (block_ids >= 0)
    columns = used.flatten(0, 1).any(0)
    columns[0] = True  # one entry at least, so that a maximum exists
    if not columns.all():  # short contexts pad the selection: do not gather what nobody reads
        used, slot_rows, block_ids = used[..., columns], slot_rows[..., columns], block_ids[..., columns]
    n_blocks = slot_rows.shape[2]
    ids = torch.where(used, block_ids, -1)
    same = ids.unsqueeze(-1) == ids.unsqueeze(-2)
    first = ~torch.tril(same, diagonal=-1).any(-1)
    tokens = ids.unsqueeze(-1) * block_size + torch.arange(block_size, device=q.device)
    valid = (tokens < lengths.view(-1, 1, 1, 1)) & (used & first).unsqueeze(-1)

    rows = slot_rows.clamp(min=0).flatten()
    kv = slots.index_select(0, rows).to(dtype)
    # A weight of zero does not silence NaN (0 * NaN = NaN), forward in V and backward in K.
    entry, offset = (~valid).view(-1, block_size).nonzero(as_tuple=True)
    if entry.numel():
        kv[entry, :, offset] = 0.0
    keys, values = kv.unbind(1)

    grouped = q.to(dtype).view(batch, n_kv_heads, 1, group, head_dim) / math.sqrt(head_dim)
    grouped = grouped.expand(-1, -1, n_blocks, -1, -1).flatten(0, 2)
    scores = torch.bmm(grouped, keys.transpose(1, 2))
    if slot_betas is not None:
        scores = scores + slot_betas.index_select(0, rows).to(dtype).unsqueeze(1)
    scores = scores.masked_fill(~valid.view(-1, 1, block_size), -math.inf)
    scores = scores.view(batch, n_kv_heads, n_blocks, group, block_size)

    # Subtracting the maximum is exact; subtracting a large log-sum-exp would round every weight alike.
    peak = _finite_or_zero(scores.detach().amax((2, 4)))
    weights = (scores - peak[:, :, None, :, None]).exp()
    total, lse = _normaliser(weights.sum((2, 4)), peak)
    parts = torch.bmm(weights.flatten(0, 2), values)
    out = parts.view(batch, n_kv_heads, n_blocks, group, head_dim).sum(2) / total.unsqueeze(-1)
    return out.reshape(batch, n_q_heads, head_dim).to(q.dtype), lse.reshape(batch, n_q_heads)


def slots_or_pages(slot_rows: Tensor | None, page_table: Tensor | None) -> Tensor:
    """The one that is given; ConfigError when it is neither or both."""
    given = [t for t in (slot_rows, page_table) if t is not None]
    if len(given) != 1:
        raise ConfigError(f"{'both' if given else 'neither'} of slot_rows and page_table given; give exactly one")
    return given[0]


def rows_of_pages(page_table: Tensor, block_ids: Tensor) -> Tensor:
    """page_table [batch, block], block_ids [batch, kv_head, k] -> int64 rows page * n_kv_heads + kv_head, [batch,
    kv_head, k]; -1 where the id is -1 or past the table, or its page is -1."""
    n_kv_heads, n_blocks = block_ids.shape[1], page_table.shape[1]
    known = (block_ids >= 0) & (block_ids < n_blocks)
    if n_blocks == 0:
        return torch.full_like(block_ids, -1, dtype=torch.int64)
    places = torch.where(known, block_ids, 0).long().flatten(1)
    pages = page_table.gather(1, places).view(block_ids.shape).long()
    heads = torch.arange(n_kv_heads, device=block_ids.device).view(-1, 1)
    return torch.where(known & (pages >= 0), pages * n_kv_heads + heads, -1)


def merge_partials(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merge attention over two disjoint sets of tokens, exactly.

    out [batch, q_head, head_dim] and lse [batch, q_head] of each part. Returns (out in out_a's type, lse). A part
    without tokens (lse -inf) counts for nothing; two such parts give zeros and -inf.
    """
    peak = _finite_or_zero(torch.maximum(lse_a, lse_b).detach())
    weight_a, weight_b = (lse_a - peak).exp(), (lse_b - peak).exp()
    total, lse = _normaliser(weight_a + weight_b, peak)
    mixed = weight_a.unsqueeze(-1) * out_a.to(lse.dtype) + weight_b.unsqueeze(-1) * out_b.to(lse.dtype)
    return (mixed / total.unsqueeze(-1)).to(out_a.dtype), lse


def _finite_or_zero(peak: Tensor) -> Tensor:
    """Zero instead of -inf: exp(-inf - -inf) would be NaN where nothing is valid."""
    return peak.masked_fill(peak == -math.inf, 0.0)


def _normaliser(total: Tensor, peak: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of weights to divide by (1 where it is 0) and log-sum-exp (-inf there), both safe to differentiate."""
    empty = total == 0
    total = total.masked_fill(empty, 1.0)
    return total, (peak + total.log()).masked_fill(empty, -math.inf)
