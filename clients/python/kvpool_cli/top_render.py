"""What `kvpool top` draws: tables of rich, with as many hosts and chains as a terminal has lines for. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kvpool_cli.output import natural, printable
from kvpool_cli.quantities import counted, size
from kvpool_cli.top_view import SOURCES, HostRow, HostStats, HotChain, View

SORTS = ("state", "name", "read", "write", "staging", "evicted")
BAD = "reverse red"  # a style of rich
_HOT_ROWS = 5  # in 24 lines; more where there is room
_OTHER_LINES = 10  # beside rows of hosts and chains, and the heading of chains
_WIDE_COLUMNS = 120
_NARROW_COLUMNS = 72
_MIN_WIDTHS = {"read": 11, "write": 11, "tokens": 11, "pages": 9}  # of figures that change, so that columns stand still


def render(
    view: View, *, columns: int, lines: int, sort: str = "state", first_host: int = 0, clock: str = ""
) -> RenderableType:
    """At most `lines` lines, if there are 13 or more. first_host: how many hosts were scrolled by."""
    hot = view.hot[: max(1, min(max(_HOT_ROWS, lines // 4), lines - _OTHER_LINES - 2))]
    host_rows = max(1, lines - _OTHER_LINES - len(hot) - 1)
    hosts = ordered(view.hosts, sort)
    first = max(0, min(first_host, len(hosts) - host_rows))
    shown = hosts[first : first + host_rows]
    hidden = len(hosts) - len(shown)
    return Group(
        _title(view, clock),
        _totals(view.total),
        "",
        _hosts(shown, columns, sort),
        _text(f"{hidden} more hosts: arrows and page keys scroll" if hidden else "", "dim"),
        _hot_chains(hot) if hot else _text("no chain is read at the moment", "dim"),
    )


def ordered(hosts: Sequence[HostRow], sort: str) -> list[HostRow]:
    """Hosts as they are shown; the largest first where a figure decides, those in trouble where the state does."""
    keys: dict[str, Callable[[HostRow], Any]] = {
        "name": lambda row: 0.0,
        "state": lambda row: (row.healthy, not row.states),
        "read": lambda row: -sum(row.stats.read_bytes.values()),
        "write": lambda row: -row.stats.write_bytes,
        "staging": lambda row: -_share(row.stats.staging_used_bytes, row.stats.staging_capacity_bytes),
        "evicted": lambda row: -sum(row.stats.evicted.values()),
    }
    first = keys[sort]
    return sorted(hosts, key=lambda row: (first(row), natural(row.host)))


def _title(view: View, clock: str) -> Text:
    store = f"{view.store} ok" if view.store_reachable else f"{view.store} NOT REACHABLE"
    hosts = f"{counted(len(view.hosts), 'host')}, {counted(sum(row.pagestores for row in view.hosts), 'pagestore')}"
    agents = counted(sum(row.agents for row in view.hosts), "agent")
    title = f"kvpool top {clock}  {hosts}, {agents}  {store}  index {view.index}"
    return _text(title, "bold" if view.store_reachable else BAD)


def _totals(total: HostStats) -> Table:
    facts = _table(has_header=False)
    facts.add_column()
    facts.add_column()
    unsaved = f", {size(total.dirty_bytes)} not durable" if total.dirty_bytes else ""
    staging = _tier(total.staging_used_bytes, total.staging_capacity_bytes, total.staging_pages, unsaved)
    facts.add_row("staging", staging)
    facts.add_row("disk", _tier(total.disk_used_bytes, total.disk_capacity_bytes, total.disk_pages))
    asked = total.matched_chunks + total.unmatched_chunks
    share = total.hit_share
    hits = "no engine asks at the moment" if share is None else f"{share:.1%} of {asked:,.1f} chunks/s asked for"
    facts.add_row("hits", _text(hits))
    sources = ", ".join(f"{source} {_rate(total.read_bytes[source])}" for source in SOURCES)
    facts.add_row("read", _text(f"{_rate(sum(total.read_bytes.values()))}: {sources}"))
    tokens = sum(total.tokens.values())
    facts.add_row("saved", _text(f"{tokens:,.0f} prompt tokens/s    write {_rate(total.write_bytes)}"))
    failed = f"{total.failed_chunks:,.1f} loads/s, {total.corrupt_pages:,.1f} corrupt pages/s"
    evicted = f"evicted {total.evicted['staging']:,.0f}/s staging, {total.evicted['disk']:,.0f}/s disk"
    bad = total.corrupt_pages or total.failed_chunks
    facts.add_row("failed", _text(f"{failed}    {evicted}"), style=BAD if bad else "")
    return facts


def _tier(used_bytes: float, capacity_bytes: float, pages: float, more: str = "") -> RenderableType:
    if not capacity_bytes:
        return _text("none")
    share = _share(used_bytes, capacity_bytes)
    tier = _table(has_header=False)
    tier.add_column(width=20)
    tier.add_column()
    text = f"{share:4.0%}  {size(used_bytes)} of {size(capacity_bytes)}, {pages:,.0f} pages{more}"
    tier.add_row(
        ProgressBar(total=1.0, completed=min(1.0, share), width=20, complete_style="cyan", finished_style="cyan"),
        _text(text),
    )
    return tier


def _hosts(hosts: Sequence[HostRow], columns: int, sort: str) -> Table:
    titles = {"name": "HOST", "staging": "STAGING", "disk": "DISK", "read": "READ", "write": "WRITE"}
    titles |= {"evicted": "EVICT/s", "pages": "PAGES", "sessions": "SESSIONS", "tokens": "TOKENS/s", "state": "STATE"}
    if columns < _WIDE_COLUMNS:
        titles = {key: title for key, title in titles.items() if key not in ("pages", "sessions", "tokens")}
    if columns < _NARROW_COLUMNS:
        titles = {key: title for key, title in titles.items() if key in ("name", "staging", "disk", "state", sort)}
    titles[sort] += "*"
    table = _table()
    for key, title in titles.items():
        is_text = key in ("name", "state")
        table.add_column(
            _text(title), justify="left" if is_text else "right", no_wrap=not is_text, min_width=_MIN_WIDTHS.get(key, 5)
        )
    for row in hosts:
        stats = row.stats
        cells = {
            "name": row.host,
            "staging": _percent(stats.staging_used_bytes, stats.staging_capacity_bytes) if row.pagestores else "-",
            "disk": _percent(stats.disk_used_bytes, stats.disk_capacity_bytes) if stats.disk_capacity_bytes else "-",
            "read": _rate(sum(stats.read_bytes.values())),
            "write": _rate(stats.write_bytes),
            "evicted": f"{sum(stats.evicted.values()):,.0f}",
            "pages": f"{stats.staging_pages + stats.disk_pages:,.0f}",
            "sessions": f"{stats.sessions:,.0f}",
            "tokens": f"{sum(stats.tokens.values()):,.0f}",
            "state": ", ".join(row.states) or "ok",
        }
        table.add_row(*(_text(cells[key]) for key in titles), style="" if row.healthy else BAD)
    return table


def _hot_chains(chains: Sequence[HotChain]) -> Table:
    table = _table()
    table.add_column("HOT CHAIN", no_wrap=True)
    table.add_column(_text("KEYSPACE"), min_width=8, max_width=20)
    table.add_column("CHUNKS", justify="right", no_wrap=True)
    table.add_column("PAGES/min", justify="right", no_wrap=True)
    table.add_column(_text("HOSTS"))
    for chain in chains:
        last = chain.first_token_chunk + chain.chunk_count - 1
        chunks, reads = f"{chain.first_token_chunk}-{last}", f"{chain.page_reads_per_minute:,.0f}"
        cells = (chain.head, chain.keyspace, chunks, reads, ", ".join(chain.hosts))
        table.add_row(*map(_text, cells))
    return table


def _table(*, has_header: bool = True) -> Table:
    return Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=has_header, header_style="bold")


def _text(text: str, style: str = "") -> Text:
    """One line, without control characters, cut with an ellipsis where it is too long."""
    return Text(printable(text), style=style, no_wrap=True, overflow="ellipsis")


def _share(used: float, capacity: float) -> float:
    return used / capacity if capacity else 0.0


def _percent(used: float, capacity: float) -> str:
    return f"{_share(used, capacity):.0%}"


def _rate(bytes_per_s: float) -> str:
    return f"{size(bytes_per_s)}/s" if bytes_per_s >= 0.5 else "0 B/s"
