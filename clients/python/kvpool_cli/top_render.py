"""The lines that `kvpool top` draws, for any size of terminal. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len, set_cell_size

from kvpool_cli.output import natural, printable
from kvpool_cli.quantities import size
from kvpool_cli.top_view import SOURCES, HostRow, HostStats, HotChain, View

SORTS = ("state", "name", "read", "write", "staging", "evicted")
PLAIN, HEAD, BAD, DIM = "", "bold", "reverse red", "dim"  # styles of rich
_BAR_CHARS = 20
_HOT_ROWS = 5  # in 24 lines; more where there is room
_SMALLEST = (40, 10)  # columns and lines


@dataclass(frozen=True, slots=True)
class Line:
    """One line, no longer than the terminal is wide."""

    text: str
    style: str = PLAIN

    @classmethod
    def cut(cls, text: str, columns: int, style: str = PLAIN) -> Line:
        """The beginning that fits, without control characters."""
        shown = printable(text)
        return cls(shown if cell_len(shown) <= columns else set_cell_size(shown, columns), style)


def render(
    view: View, *, columns: int, lines: int, sort: str = "state", first_host: int = 0, clock: str = ""
) -> list[Line]:
    """At most `lines` lines. first_host: how many hosts were scrolled by."""
    if columns < _SMALLEST[0] or lines < _SMALLEST[1]:
        return [Line(f"{_SMALLEST[0]}x{_SMALLEST[1]}, please"[:columns], BAD)][:lines]
    head = _head(view, clock)
    hot_rows = min(len(view.hot), max(_HOT_ROWS, lines // 4))
    below = hot_rows + 2 if view.hot else 2
    host_rows = max(1, lines - len(head) - below - 2)  # an empty line and the names of columns
    hosts = ordered(view.hosts, sort)
    first = max(0, min(first_host, len(hosts) - host_rows))
    shown = hosts[first : first + host_rows]
    drawn = [*head, Line(""), *_host_lines(shown, columns, sort)]
    hidden = len(hosts) - len(shown)
    drawn.append(Line(f"{hidden} more hosts: arrows and page keys scroll" if hidden else "", DIM))
    drawn += _hot_lines(view.hot[:hot_rows], columns)
    return [Line.cut(line.text, columns, line.style) for line in drawn[:lines]]


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


def _head(view: View, clock: str) -> list[Line]:
    total = view.total
    store = f"{view.store} ok" if view.store_reachable else f"{view.store} NOT REACHABLE"
    hosts = f"{len(view.hosts)} hosts, {sum(row.pagestores for row in view.hosts)} pagestores"
    agents = f"{sum(row.agents for row in view.hosts)} agents"
    title = f"kvpool top {clock}  {hosts}, {agents}  {store}  index {view.index}"
    read = sum(total.read_bytes.values())
    sources = ", ".join(f"{source} {_rate(total.read_bytes[source])}" for source in SOURCES)
    tokens = sum(total.tokens.values())
    bad = total.corrupt_pages or total.failed_chunks
    return [
        Line(title, HEAD if view.store_reachable else BAD),
        Line(
            _tier("staging", total.staging_used_bytes, total.staging_capacity_bytes, total.staging_pages)
            + (f", {size(total.dirty_bytes)} not durable" if total.dirty_bytes else "")
        ),
        Line(_tier("disk", total.disk_used_bytes, total.disk_capacity_bytes, total.disk_pages)),
        Line(_hits(total)),
        Line(f"read     {_rate(read)}: {sources}"),
        Line(f"saved    {tokens:,.0f} prompt tokens/s    write {_rate(total.write_bytes)}"),
        Line(
            # What is cut off first on a narrow terminal stands last.
            f"failed   {total.failed_chunks:,.1f} loads/s, {total.corrupt_pages:,.1f} corrupt pages/s    "
            f"evicted {total.evicted['staging']:,.0f}/s staging, {total.evicted['disk']:,.0f}/s disk",
            BAD if bad else PLAIN,
        ),
    ]


def _tier(name: str, used_bytes: float, capacity_bytes: float, pages: float) -> str:
    if not capacity_bytes:
        return f"{name:<8} none"
    share = _share(used_bytes, capacity_bytes)
    filled = round(min(1.0, share) * _BAR_CHARS)
    bar = "#" * filled + "-" * (_BAR_CHARS - filled)
    return f"{name:<8} [{bar}] {share:4.0%}  {size(used_bytes)} of {size(capacity_bytes)}, {pages:,.0f} pages"


def _hits(total: HostStats) -> str:
    share = total.hit_share
    asked = total.matched_chunks + total.unmatched_chunks
    if share is None:
        return "hits     no engine asks at the moment"
    return f"hits     {share:.1%} of {asked:,.1f} chunks/s that engines asked for"


def _host_lines(hosts: Sequence[HostRow], columns: int, sort: str) -> list[Line]:
    wide = columns >= 120
    longest = max([4, *(cell_len(row.host) for row in hosts)])
    names = max(8, min(longest, columns - (110 if wide else 66)))
    titles = {
        "name": "HOST",
        "read": "READ",
        "write": "WRITE",
        "staging": "STAGING",
        "evicted": "EVICT/s",
        "state": "STATE",
    }
    titles[sort] += "*"
    more = ["PAGES", "SESSIONS", "TOKENS/s"] if wide else []
    head = _columns(
        titles["name"],
        names,
        [titles["staging"], "DISK", titles["read"], titles["write"], titles["evicted"], *more],
        titles["state"],
    )
    lines = [Line(head, HEAD)]
    for row in hosts:
        stats = row.stats
        cells = [
            f"{_share(stats.staging_used_bytes, stats.staging_capacity_bytes):.0%}" if row.pagestores else "-",
            f"{_share(stats.disk_used_bytes, stats.disk_capacity_bytes):.0%}" if stats.disk_capacity_bytes else "-",
            _rate(sum(stats.read_bytes.values())),
            _rate(stats.write_bytes),
            f"{sum(stats.evicted.values()):,.0f}",
        ]
        if wide:
            tokens = sum(stats.tokens.values())
            cells += [
                f"{stats.staging_pages + stats.disk_pages:,.0f}",
                f"{stats.sessions:,.0f}",
                f"{tokens:,.0f}",
            ]
        style = PLAIN if row.healthy else BAD
        lines.append(Line(_columns(row.host, names, cells, ", ".join(row.states) or "ok"), style))
    return lines


def _columns(name: str, name_chars: int, cells: Sequence[str], state: str) -> str:
    shown = _short(name, name_chars)
    widths = (8, 5, 11, 11, 8, 11, 8, 10)  # the beginning of them on a narrow terminal
    stats = "".join(f" {cell:>{width}}" for cell, width in zip(cells, widths, strict=False))
    return f"{set_cell_size(shown, name_chars)}{stats}  {state}"


def _short(name: str, cells: int) -> str:
    return name if cell_len(name) <= cells else f"{set_cell_size(name, cells - 1)}~"


def _hot_lines(chains: Sequence[HotChain], columns: int) -> list[Line]:
    if not chains:
        return [Line("no chain is read at the moment", DIM)]
    lines = [Line(f"{'HOT CHAIN':<13}{'KEYSPACE':<20}{'CHUNKS':>12}{'PAGES/min':>11}  HOSTS", HEAD)]
    for chain in chains:
        last = chain.first_token_chunk + chain.chunk_count - 1
        keyspace = set_cell_size(_short(chain.keyspace, 19), 20)
        hosts = ", ".join(chain.hosts)
        where = f"{chain.first_token_chunk}-{last}"
        lines.append(Line(f"{chain.head:<13}{keyspace}{where:>12}{chain.page_reads_per_minute:>11,.0f}  {hosts}"))
    return lines


def _share(used: float, capacity: float) -> float:
    return used / capacity if capacity else 0.0


def _rate(bytes_per_s: float) -> str:
    return f"{size(bytes_per_s)}/s" if bytes_per_s >= 0.5 else "0 B/s"
