"""The prompt part of a batch's cache: rows of different lengths, padded on the left, that may have prefixes in common.

A row's chunks are addressed by its own tokens. Padding is never hashed, loaded or stored; its columns stay zero.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvpool.client.engine_items import RequestStats
from kvpool.client.hashing import Prompt
from kvpool.connectors.batch_plan import GPU_PASS_TOKENS, PASS_TOKENS, BatchPlan, RowPlan, plan_batch
from kvpool.connectors.prefix import Prefix
from kvpool.connectors.prefix_cache import PrefixCache
from kvpool.connectors.transformers_blocks import KvBlocks
from kvpool.connectors.transformers_caches import growing_cache

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

# Keys differ by rounding only where padding is masked and positions begin behind it; else by as much as they are.
_SAME_KEYS_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class FilledBatch:
    """rows: of each row, where its tokens came from. waited_ms: for the pool, until all rows were in."""

    rows: tuple[RequestStats, ...]
    match_ms: float
    load_ms: float
    failure: str

    @classmethod
    def of_one(cls, token_count: int, found: Prefix, chunk_tokens: int) -> FilledBatch:
        """A row of which all that was found is used."""
        row = _from_found(token_count, found, len(found.blocks) * chunk_tokens, chunk_tokens)
        return cls((row,), found.match_ms, found.load_ms, found.failure)

    @property
    def waited_ms(self) -> float:
        """Time that was no computing."""
        return self.match_ms + self.load_ms


def own_tokens(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> list[npt.NDArray[np.int64]]:
    """Each row without its padding, which is on the left."""
    rows, lengths = input_ids.cpu().numpy(), attention_mask.sum(dim=1).tolist()
    return [row[len(row) - length :] for row, length in zip(rows, lengths, strict=True)]


def fill_batch(
    model: PreTrainedModel,
    blocks: KvBlocks,
    cache: PrefixCache,
    rows: Sequence[npt.NDArray[np.int64]],
    width: int,
    kv_cache: Any,
) -> FilledBatch:
    """Put into kv_cache, which is empty, as many leading columns of the batch as pays: found, copied or computed.

    rows: each row's own tokens, the last ones of `width` columns.
    """
    found = find_rows(cache, rows)
    try:
        known = [len(prefix.blocks) * cache.chunk_tokens for prefix in found]
        pass_tokens = GPU_PASS_TOKENS if model.device.type == "cuda" else PASS_TOKENS
        plan = plan_batch(rows, known, width, pass_tokens)
        if plan.cut:
            layers = _assemble(model, blocks, rows, width, found, plan)
            for number in range(len(layers)):
                keys, values = layers.pop(0)  # a cache that grows makes a copy of each layer
                kv_cache.update(keys, values, number)
    finally:
        for prefix in found:
            cache.release(prefix)
    return FilledBatch(
        rows=tuple(_row_stats(cache.chunk_tokens, *each) for each in zip(rows, found, plan.rows, strict=True)),
        match_ms=sum(prefix.match_ms for prefix in found),
        load_ms=sum(prefix.load_ms for prefix in found),
        failure=next((prefix.failure for prefix in found if prefix.failure), ""),
    )


def find_rows(cache: PrefixCache, rows: Sequence[npt.NDArray[np.int64]]) -> list[Prefix]:
    """What is to be had of each row, all of it pinned. Loads of rows that have nothing in common run beside each other.

    A row that goes on with a chunk that another one loads waits for that one, and has the chunk from it. A pool that
    cannot be asked is not asked again, nor one from which nothing came.
    """
    found: dict[int, Prefix] = {}
    running: dict[int, Prefix] = {}
    ask_pool, left = True, list(range(len(rows)))
    try:
        while left:
            waiting = []
            for number in left:
                begun = cache.begin_beside(rows[number], ask_pool=ask_pool)
                if begun is None:
                    waiting.append(number)
                    continue
                running[number] = begun
                if begun.finished:
                    ask_pool = ask_pool and not begun.finish().failure
            for number in list(running):
                found[number] = prefix = running[number].finish()
                del running[number]
                ask_pool = ask_pool and not (prefix.failure and not prefix.loaded.loaded_chunks)
            left = waiting
    except BaseException:
        for prefix in (*found.values(), *(begun.finish() for begun in running.values())):
            cache.release(prefix)
        raise
    return [found[number] for number in range(len(rows))]


def _assemble(
    model: PreTrainedModel,
    blocks: KvBlocks,
    rows: Sequence[npt.NDArray[np.int64]],
    width: int,
    found: Sequence[Prefix],
    plan: BatchPlan,
) -> list[torch.Tensor]:
    """Of each layer [k and v, rows, heads, columns up to the cut, head dim]."""
    layers = blocks.empty_layers(len(rows), plan.cut, model.device)
    for number, (row, prefix, row_plan) in enumerate(zip(rows, found, plan.rows, strict=True)):
        own = [layer[:, number, :, width - len(row) :] for layer in layers]
        if row_plan.copied_from is not None:
            first = width - len(rows[row_plan.copied_from])
            for layer, target in zip(layers, own, strict=True):
                source = layer[:, row_plan.copied_from, :, first : first + row_plan.ready]
                target[:, :, : row_plan.ready] = source
        elif row_plan.ready:
            blocks.copy_out(prefix.blocks, row_plan.ready, own)
        if row_plan.computed:
            _compute(model, row, row_plan, own)
    return layers


def _compute(model: PreTrainedModel, row: npt.NDArray[np.int64], plan: RowPlan, own: Sequence[torch.Tensor]) -> None:
    """Compute the tokens of one row between what is ready and the cut, and put their KV into its part of the batch.

    own: of each layer [k and v, heads, the row's tokens up to the cut, head dim].
    """
    import torch

    end = plan.ready + plan.computed
    cache = growing_cache(model)
    if plan.ready:
        for number, layer in enumerate(own):
            cache.update(layer[:1, :, : plan.ready], layer[1:, :, : plan.ready], number)
    tokens = torch.tensor(row[plan.ready : end], dtype=torch.long, device=model.device).unsqueeze(0)
    # Nothing reads the logits, which are large.
    fewer = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    with torch.no_grad():
        model(input_ids=tokens, past_key_values=cache, use_cache=True, **fewer)
    for layer, computed in zip(own, cache.layers, strict=True):
        layer[0, :, plan.ready : end] = computed.keys[0, :, plan.ready :]
        layer[1, :, plan.ready : end] = computed.values[0, :, plan.ready :]


def _row_stats(chunk_tokens: int, row: npt.NDArray[np.int64], found: Prefix, plan: RowPlan) -> RequestStats:
    if plan.copied_from is not None:
        return RequestStats(own=plan.ready, recomputed=len(row) - plan.ready)
    return _from_found(len(row), found, plan.ready, chunk_tokens)


def _from_found(token_count: int, found: Prefix, used_tokens: int, chunk_tokens: int) -> RequestStats:
    used = Prompt(chunk_tokens, used_tokens + 1, b"")
    stats = RequestStats.of(used, own_tokens=found.own_chunks * chunk_tokens, loaded=found.loaded.tokens)
    return stats + RequestStats(recomputed=token_count - stats.prompt)


def len_to_end(tokens: npt.NDArray[np.int64], prompt_count: int, eos_tokens: Sequence[int]) -> int:
    """Tokens up to the end of what was generated for a row: transformers fills up a row that ended before others."""
    ends = np.flatnonzero(np.isin(tokens[prompt_count:], eos_tokens))
    return prompt_count + int(ends[0]) + 1 if len(ends) else len(tokens)


def pads_cleanly(model: PreTrainedModel) -> bool:
    """Whether a padded row's KV is that of the row without padding. Computes five tokens."""
    import torch

    keys: list[list[torch.Tensor]] = []
    for padding in (1, 0):
        cache = growing_cache(model)
        input_ids = torch.tensor([[0, 1, 2][1 - padding :]], device=model.device)
        mask = torch.ones_like(input_ids)
        mask[:, :padding] = 0
        model.generate(
            input_ids, attention_mask=mask, past_key_values=cache, max_new_tokens=1, do_sample=False, num_beams=1
        )
        keys.append([layer.keys[:, :, padding : padding + 2].float() for layer in cache.layers])
    return all(
        bool((padded - plain).abs().max() <= _SAME_KEYS_SHARE * plain.abs().max())
        for padded, plain in zip(*keys, strict=True)
    )
