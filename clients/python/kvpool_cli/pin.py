"""`kvpool cache pin` and `kvpool cache unpin`: keep the chunks of a prompt from being evicted, for a time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import RenderableType

from kvpool.client.pagestore_control import PageStoreControl
from kvpool.core.cluster import LiveNode
from kvpool.core.errors import KvPoolError
from kvpool.core.retention import PINNED_FOREVER_US
from kvpool_cli.answers import nodes_document, nodes_table
from kvpool_cli.chains import Chain, chain_of
from kvpool_cli.common import Common
from kvpool_cli.errors import EXIT_FAILED, EXIT_OK, UsageFailed
from kvpool_cli.options import Keyspace, duration_option
from kvpool_cli.output import print_json, show, stack
from kvpool_cli.pin_list import wall_time
from kvpool_cli.prompts import TokenSource
from kvpool_cli.targets import Target, find_target, live_pagestores, on_pagestores, open_index, run

CALL_TIMEOUT_S = 30.0
_DEFAULT_S = 86_400.0


def pin(
    common: Common,
    prompt: TokenSource,
    keyspace: Keyspace = "",
    duration_s: Annotated[float | None, duration_option("--for", "How long, such as 12h (default 1d).")] = None,
    forever: Annotated[bool, typer.Option("--forever", help="Until `kvpool cache unpin`.")] = False,
) -> int:
    """Protect the chunks of a prompt from eviction, for a time.

    A pin is durable for durable pages, ends by itself, and counts against the node's max_pinned_share; it does not
    bring pages that no node holds. Exit code 1 unless all pagestores did it and any page was there.
    """
    if forever and duration_s is not None:
        raise UsageFailed("--for and --forever exclude each other")
    until_us = PINNED_FOREVER_US if forever else int((time.time() + (duration_s or _DEFAULT_S)) * 1e6)
    return _set_pins(common, prompt, keyspace, until_us)


def unpin(common: Common, prompt: TokenSource, keyspace: Keyspace = "") -> int:
    """End the pins of a prompt's chunks, also those that were stored with a pin."""
    return _set_pins(common, prompt, keyspace, 0)


def _set_pins(common: Common, prompt: TokenSource, keyspace: str, until_us: int) -> int:
    tokens = prompt.one()
    pinned = run(_pin(find_target(common), keyspace, tokens, until_us))
    if common.json:
        print_json(to_document(pinned))
    else:
        show(render(pinned))
    return EXIT_OK if pinned.page_count and not pinned.failed else EXIT_FAILED


@dataclass(frozen=True, slots=True, kw_only=True)
class Pinned:
    """Per node the pages that have the pin now, or why not; until_us 0: they have none."""

    chain: Chain
    until_us: int
    answers: Sequence[tuple[LiveNode, int | KvPoolError]]

    @property
    def page_count(self) -> int:
        """Sum over all nodes."""
        return sum(answer for _, answer in self.answers if isinstance(answer, int))

    @property
    def failed(self) -> bool:
        """Whether any node did not do it."""
        return any(isinstance(answer, KvPoolError) for _, answer in self.answers)


async def _pin(target: Target, keyspace_name: str, tokens: Sequence[int], until_us: int) -> Pinned:
    async with open_index(target) as index:
        chain = await chain_of(index, keyspace_name, tokens)
        nodes = await live_pagestores(index)

    async def pin(control: PageStoreControl) -> int:
        keyspace = chain.opened.keyspace
        return sum(
            [await control.pin(keyspace, batch, until_us, timeout_s=CALL_TIMEOUT_S) for batch in chain.batches()]
        )

    return Pinned(chain=chain, until_us=until_us, answers=await on_pagestores(target, nodes, pin))


def to_document(pinned: Pinned) -> dict[str, Any]:
    """The document of `--json`."""
    return {
        "version": 1,
        "keyspace": pinned.chain.named.name,
        "chunks": pinned.chain.chunk_count,
        "pinned_until_us": pinned.until_us,
        "nodes": nodes_document(pinned.answers, lambda pages: {"pages": pages}, 0),
    }


def render(pinned: Pinned) -> RenderableType:
    """A table for people."""
    what = f"{pinned.chain.chunk_count} chunks of keyspace {pinned.chain.named.name}"
    if not pinned.page_count:
        lacking = "see the errors" if pinned.failed else "let an engine store them first"
        head = f"nothing was done: no node holds any of the {what}; {lacking}"
    elif not pinned.until_us:
        head = f"{what} are not pinned any more"
    elif pinned.until_us == PINNED_FOREVER_US:
        head = f"{what} are pinned until `kvpool cache unpin`"
    else:
        head = f"{what} are pinned until {wall_time(pinned.until_us)}"
    return stack(head, "", nodes_table(pinned.answers, ["pages"], lambda pages: [pages]))
