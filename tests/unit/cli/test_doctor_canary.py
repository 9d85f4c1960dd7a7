"""The canary against servers that share a pool, well or badly."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from kvpool_cli.doctor import canary
from kvpool_cli.main import run_command

CHUNK = 256


class Server(ThreadingHTTPServer):
    """Continues a prompt by a sum of its tokens, as vLLM with a connector does; each chunk is its own or the pool's.

    pool: None for a server without a connector. salt: stands for KV that was changed on its way. reports: whether it
    says how many tokens were cached. counts: whether /metrics has the counters of hits. caches: whether it has a cache
    of its own. other_hits: tokens that other requests have from either cache while one is answered. stores: up to which
    token it stores the two prompts of each attempt; empty: all. owner: of the model; only vLLM knows a request's
    options. obeys: whether the connector knows kvpool's. returns_ids: whether it returns token ids beside the text.
    """

    def __init__(
        self,
        pool: set[tuple[int, ...]] | None,
        *,
        salt: int = 0,
        reports: bool = True,
        counts: bool = True,
        caches: bool = True,
        other_hits: int = 0,
        stores: Sequence[int] = (),
        owner: str = "vllm",
        obeys: bool = True,
        returns_ids: bool = True,
        started_s: float = 1.7958757299e09,
        context_tokens: int = 4096,
        api_key: str = "",
    ) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.pool, self.salt, self.reports = pool, salt, reports
        self.counts, self.caches, self.other_hits, self.started_s = counts, caches, other_hits, started_s
        self.stores, self.owner, self.obeys, self.returns_ids = stores, owner, obeys, returns_ids
        self.context_tokens, self.api_key = context_tokens, api_key
        self.options: list[dict[str, Any]] = []
        self.prompts: list[list[int]] = []
        self.own: set[tuple[int, ...]] = set()
        self.own_hits = self.connector_hits = 0

    def document(self, path: str, body: dict[str, Any]) -> dict[str, Any] | str | None:
        if path == "/tokenize":
            return {"tokens": [1, *(sum(word.encode()) for word in body["prompt"].split())]}
        if path == "/v1/models":
            return {"data": [{"id": "tiny", "owned_by": self.owner}]}
        if path == "/metrics":
            return self.metrics()
        if path != "/v1/completions":
            return None
        assert body["temperature"] == 0 and body["model"] == "tiny"
        assert self.owner == "vllm" or "kv_transfer_params" not in body
        prompt, options = body["prompt"], body.get("kv_transfer_params", {}).get("kvpool", {})
        attempt = len(self.prompts) // 2
        self.prompts.append(prompt)
        self.options.append(options)
        prefixes = [tuple(prompt[:end]) for end in range(CHUNK, len(prompt) + 1, CHUNK)]
        cached = max((len(each) for each in prefixes if each in self.own), default=0)
        loaded = max((len(each) for each in prefixes if each in (self.pool or ())), default=0)
        if self.obeys and not options.get("load", True):
            loaded = 0
        self.own_hits += cached + self.other_hits
        self.connector_hits += max(0, loaded - cached) + self.other_hits
        wrong = self.salt if loaded > cached else 0
        if self.caches:
            self.own.update(prefixes)
        if self.pool is not None:
            stored_tokens = self.stores[attempt] if self.stores else len(prompt)
            self.pool.update(each for each in prefixes if len(each) <= stored_tokens)
        usage: dict[str, Any] = {"prompt_tokens": len(prompt)}
        if self.reports:
            usage["prompt_tokens_details"] = {"cached_tokens": max(cached, loaded)}
        tokens = [sum(prompt) % 1000 + number + (wrong if number > 3 else 0) for number in range(body["max_tokens"])]
        ids = {"token_ids": tokens} if self.returns_ids else {}
        return {"choices": [{"text": " ".join(map(str, tokens)), **ids}], "usage": usage}

    def metrics(self) -> str | None:
        labels = '{engine="0",model_name="tiny"}'
        return (
            f"""# TYPE process_start_time_seconds gauge
process_start_time_seconds {self.started_s}
# TYPE vllm:prefix_cache_hits_total counter
vllm:prefix_cache_hits_total{labels} {float(self.own_hits)}
# TYPE vllm:external_prefix_cache_hits_total counter
vllm:external_prefix_cache_hits_total{labels} {float(self.connector_hits)}
"""
            if self.counts
            else None
        )


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.do_POST()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
        key = self.headers.get("Authorization", "")
        if self.path.startswith("/v1") and key != (self.server.api_key and f"Bearer {self.server.api_key}"):
            self.answer(401, f"Unauthorized {key}")
        elif (
            len(body.get("prompt", ())) * (self.path != "/tokenize") + body.get("max_tokens", 0)
            > self.server.context_tokens
        ):
            self.answer(400, f"maximum context length is {self.server.context_tokens}\x1b[2J\n" + "x" * 10_000)
        else:
            document = self.server.document(self.path, body)
            self.answer(
                404 if document is None else 200, document if isinstance(document, str) else json.dumps(document)
            )

    def answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def serving(server: Server) -> Iterator[str]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


Start = Callable[[Server], str]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.setattr(canary, "_WAITS_S", (0.0, 0.0, 0.0))
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with ExitStack() as stack:
        yield lambda server: stack.enter_context(serving(server))


def doctor(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, Any]]:
    code = run_command(["doctor", "--canary", *argv, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_what_the_second_server_loads_is_continued_as_the_first_did(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    pool: set[tuple[int, ...]] = set()
    servers = Server(pool), Server(pool)
    code, document = doctor(capsys, "--server", start(servers[0]), "--second", start(servers[1]))
    [finding] = document["findings"]
    assert (code, finding["level"]) == (0, "ok")
    assert "loaded 2048 of 2063 tokens" in finding["message"]
    assert [len(each) for each in servers[0].prompts] == [2048, 2063]  # the boundary is the same on both
    assert [len(each) for each in servers[1].prompts] == [2063]


def test_changed_kv_is_found(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    pool: set[tuple[int, ...]] = set()
    code, document = doctor(capsys, "--server", start(Server(pool)), "--second", start(Server(pool, salt=7)))
    [finding] = document["findings"]
    assert (code, finding["level"]) == (1, "error")
    assert "differ" in finding["message"] and "from token 5 of 32 on" in finding["message"]
    assert "rounding" not in finding["message"]


@pytest.mark.parametrize(
    ("first", "part"),
    [
        ({"reports": False}, "does not report where it began to compute"),
        ({"caches": False}, "began to compute after 0 tokens"),
    ],
)
def test_rounding_is_named_where_the_two_may_not_have_begun_at_one_token(
    first: dict[str, Any], part: str, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    pool: set[tuple[int, ...]] = set()
    urls = start(Server(pool, **first)), start(Server(pool, salt=7))
    code, document = doctor(capsys, "--server", urls[0], "--second", urls[1])
    assert code == 1
    assert f"({urls[0]} {part}: rounding may be the cause)" in document["findings"][0]["message"]


def test_texts_are_compared_where_a_server_returns_no_token_ids(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    pool: set[tuple[int, ...]] = set()
    urls = start(Server(pool, returns_ids=False)), start(Server(pool, returns_ids=False, salt=7))
    code, document = doctor(capsys, "--server", urls[0], "--second", urls[1])
    assert code == 1
    assert f"its greedy text differs from that of {urls[0]}" in document["findings"][0]["message"]


@pytest.mark.parametrize(("reports", "part"), [(True, "loaded nothing"), (False, "does not report")])
def test_nothing_loaded_proves_nothing(
    reports: bool, part: str, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    second = Server(set(), reports=reports)
    code, document = doctor(capsys, "--server", start(Server(set())), "--second", start(second))
    assert code == 1
    assert part in document["findings"][0]["message"] and "proves nothing" in document["findings"][0]["message"]
    remedy = document["findings"][0]["remediation"]
    assert ("`load` is not never" in remedy and "vllm:kvpool_declined_chunks did not grow" in remedy) == reports
    assert len({tuple(each) for each in second.prompts}) == (3 if reports else 1), "each attempt has its own prompt"


@pytest.mark.parametrize(
    ("stores", "loaded", "attempts"),
    [((256, 1024, 2048), 2048, 3), ((1024, 2048), 2048, 2), ((1024, 1024), 1024, 2), ((0, 1024, 1280), 1280, 3)],
)
def test_a_part_is_compared_only_when_no_more_comes(
    stores: Sequence[int], loaded: int, attempts: int, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    pool: set[tuple[int, ...]] = set()
    second = Server(pool)
    code, document = doctor(capsys, "--server", start(Server(pool, stores=stores)), "--second", start(second))
    [finding] = document["findings"]
    assert code == 0 and f"loaded {loaded} of 2063 tokens" in finding["message"]
    assert len(second.prompts) == attempts


def test_prompts_leave_the_pool_by_themselves_and_the_reference_is_not_loaded(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pool: set[tuple[int, ...]] = set()
    first, second, saved = Server(pool, caches=False), Server(pool), Server(pool)
    assert doctor(capsys, "--server", start(first), "--second", start(second))[0] == 0
    assert doctor(capsys, "--server", start(saved), "--save", str(tmp_path / "canary.json"))[0] == 0
    assert first.options == [{"load": False, "ttl_s": 3600}] * 2
    assert second.options == [{"ttl_s": 3600}]
    assert saved.options == [{"load": False, "ttl_s": 86400}] * 2


def test_other_engines_get_no_options(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    pool: set[tuple[int, ...]] = set()
    urls = [start(Server(pool, owner="sglang", counts=False)) for _ in range(2)]
    assert doctor(capsys, "--server", urls[0], "--second", urls[1])[0] == 0


@pytest.mark.parametrize(("salt", "code"), [(0, 0), (7, 1)])
def test_a_restarted_server_is_compared_with_what_was_saved(
    salt: int, code: int, start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pool: set[tuple[int, ...]] = set()
    file = tmp_path / "canary.json"
    assert doctor(capsys, "--server", start(Server(pool)), "--save", str(file))[0] == 0
    restarted = start(Server(pool, salt=salt, started_s=2e9))
    assert doctor(capsys, "--server", restarted, "--expect", str(file))[0] == code


@pytest.mark.parametrize(("reports", "levels"), [(True, ["ok"]), (False, ["warning", "ok"])])
def test_saving_warns_of_a_server_that_does_not_report_cached_tokens(
    reports: bool, levels: list[str], start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = start(Server(set(), reports=reports))
    code, document = doctor(capsys, "--server", url, "--save", str(tmp_path / "canary.json"))
    assert code == 0 and [finding["level"] for finding in document["findings"]] == levels
    assert ("--enable-prompt-tokens-details" in document["findings"][0]["remediation"]) != reports


def test_a_second_run_against_one_restart_proves_nothing(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pool: set[tuple[int, ...]] = set()
    file = tmp_path / "canary.json"
    assert doctor(capsys, "--server", start(Server(pool)), "--save", str(file))[0] == 0
    restarted = start(Server(pool, started_s=2e9))
    assert doctor(capsys, "--server", restarted, "--expect", str(file))[0] == 0
    code, document = doctor(capsys, "--server", restarted, "--expect", str(file))
    [finding] = document["findings"]
    assert (code, finding["level"]) == (1, "error")
    assert "had 2048 cached tokens, of which a connector loaded 0" in finding["message"]
    assert "restart the server before each run" in finding["remediation"]


def test_a_server_that_was_not_restarted_proves_nothing(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = Server(None)
    url, file = start(server), tmp_path / "canary.json"
    assert doctor(capsys, "--server", url, "--save", str(file))[0] == 0
    prompts = len(server.prompts)
    code, document = doctor(capsys, "--server", f"{url}/v1/", "--expect", str(file))
    assert (code, document["errors"]) == (1, 1)
    assert "was not restarted" in document["findings"][0]["message"]
    assert len(server.prompts) == prompts


def test_two_addresses_of_one_server_prove_nothing(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    url = start(Server(None))
    code, document = doctor(capsys, "--server", url, "--second", url.replace("127.0.0.1", "localhost"))
    assert (code, document["errors"]) == (1, 1)
    assert "own cache" in document["findings"][0]["message"]


@pytest.mark.parametrize(
    ("counts", "other_hits", "part"),
    [(False, 0, "has no vllm:external_prefix_cache_hits_total"), (True, 4096, "served other requests")],
)
def test_cached_tokens_of_unknown_source_are_a_warning(
    counts: bool, other_hits: int, part: str, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    for salt, code in ((0, 0), (7, 1)):
        pool: set[tuple[int, ...]] = set()
        second = Server(pool, counts=counts, other_hits=other_hits, salt=salt)
        found, document = doctor(capsys, "--server", start(Server(pool)), "--second", start(second))
        uncertain, compared = document["findings"]
        assert (found, uncertain["level"], compared["level"]) == (code, "warning", "error" if code else "ok")
        assert part in uncertain["message"]


def test_a_reference_that_was_loaded_is_refused(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    pool: set[tuple[int, ...]] = set()
    argv = ["--server", start(Server(pool, caches=False, obeys=False)), "--second", start(Server(pool))]
    code, document = doctor(capsys, *argv)
    assert code == 1
    assert "loaded 2048 tokens of the reference instead of computing them" in document["error"]


@pytest.mark.parametrize(
    "argv",
    [
        ["doctor", "--server", "http://a"],
        ["doctor", "--canary"],
        ["doctor", "--canary", "--server", "http://a"],
        ["doctor", "--canary", "--server", "http://a", "--second", "http://b", "--save", "file"],
        ["doctor", "--canary", "--server", "http://a", "--second", "http://a/"],
        ["doctor", "--canary", "--server", "http://a/v1", "--second", "http://a"],
        ["doctor", "--canary", "--server", "file:///etc", "--second", "http://a/"],
    ],
)
def test_what_does_not_fit_together_is_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(argv) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_what_is_not_such_a_file_or_server_is_one_line(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "canary.json"
    file.write_text("[]")
    assert run_command(["doctor", "--canary", "--server", start(Server(set())), "--expect", str(file)]) == 1
    assert "is not what --save wrote" in capsys.readouterr().err
    assert run_command(["doctor", "--canary", "--server", "http://127.0.0.1:1", "--second", "http://a"]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_what_a_server_says_when_it_refuses_is_shown_in_one_line(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    url = start(Server(set(), context_tokens=1024))
    assert run_command(["doctor", "--canary", "--server", url, "--second", "http://a"]) == 1
    said = capsys.readouterr().err
    assert f"{url}/v1/completions answers 400: maximum context length is 1024?[2J x" in said
    assert "does not answer" not in said
    assert len(said) < 500 and len(said.splitlines()) == 1


def test_an_api_key_comes_from_an_option_or_the_environment_and_is_not_shown(
    start: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pool: set[tuple[int, ...]] = set()
    urls = [start(Server(pool, api_key="sk-right")) for _ in range(2)]
    argv = ["doctor", "--canary", "--server", urls[0], "--second", urls[1]]
    assert run_command(argv) == 1
    said = capsys.readouterr().err
    assert "answers 401: Unauthorized" in said and "OPENAI_API_KEY" in said
    assert run_command([*argv, "--api-key", "sk-right"]) == 0
    monkeypatch.setenv("OPENAI_API_KEY", "sk-right\n")
    assert run_command(argv) == 0
    capsys.readouterr()
    for wrong, code in (("sk-wrong", 1), ("sk-wr\nong", 2), ("sk-wröng", 2)):
        assert run_command([*argv, "--api-key", wrong]) == code
        shown = capsys.readouterr()
        assert "sk-w" not in shown.out + shown.err
