"""A loopback server with as much of the hub's HTTP interface as listing models and reading their config.json takes, which
also is a webhook that keeps what it is told at /told."""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

CONFIG = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 1024, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072, "vocab_size": 151936,
    "max_position_embeddings": 32768, "tie_word_embeddings": True, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
}  # fmt: skip
PAGE = 3


def model(name: str, *, sha: str = "a", days: int = 1, licence: str = "apache-2.0", size: int | None = 600_000_000,
          gated: bool = False, **config: Any) -> dict[str, Any]:  # fmt: skip
    """An entry of the hub's list. ``sha``: one hex digit; ``config``: changes to config.json."""
    whole = {**CONFIG, **config}
    made = datetime.now(UTC) - timedelta(days=days)
    return {
        "_id": name, "id": name, "sha": sha * 40, "gated": "auto" if gated else False, "private": False,
        "createdAt": made.strftime("%Y-%m-%dT%H:%M:%S.000Z"), "tags": [f"license:{licence}"] if licence else [],
        "cardData": {"license": licence} if licence else {},
        "config": {key: whole[key] for key in ("model_type", "auto_map", "quantization_config") if key in whole},
        **({"safetensors": {"parameters": {"BF16": size}, "total": size}} if size else {}), "whole": whole,
    }  # fmt: skip


class Hub(BaseHTTPRequestHandler):
    models: dict[str, dict[str, Any]]
    seen: list[tuple[str, str]]
    told: list[Any]
    broken: list[int]
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def _send(self, status: int, content: object, **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), "Content-Type": "application/json", **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_POST(self) -> None:
        self.told.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self._send(200, {})

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        self.seen.append((url.path, self.headers.get("Authorization") or ""))
        if self.broken:
            self._send(self.broken[0], {"error": "not now"})
        elif url.path == "/api/models":
            self._list(parse_qs(url.query))
        elif (match := re.fullmatch(r"/([\w.-]+/[\w.-]+)/resolve/\w+/config.json", url.path)) and match[
            1
        ] in self.models:
            entry = self.models[match[1]]
            body = json.dumps(entry["whole"]).encode()
            self._send(200, body, ETag=f'"{entry["sha"]}"', X_Repo_Commit=entry["sha"])
        elif (match := re.match(r"/api/models/([\w.-]+/[\w.-]+)", url.path)) and match[1] in self.models:
            self._send(200, self._shown(self.models[match[1]]))
        else:
            self._send(404, {}, X_Error_Code="RepoNotFound")

    do_HEAD = do_GET

    def _list(self, query: dict[str, list[str]]) -> None:
        of = [self._shown(m) for name, m in self.models.items() if name.split("/")[0] == query["author"][0]]
        start = int(query.get("cursor", ["0"])[0])
        more = {}
        if start + PAGE < len(of):
            here = f"http://{self.headers['Host']}/api/models?author={query['author'][0]}&cursor={start + PAGE}"
            more = {"Link": f'<{here}>; rel="next"'}
        self._send(200, of[start : start + PAGE], **more)

    def _shown(self, entry: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in entry.items() if key != "whole"}


@contextmanager
def model_hub(models: list[dict[str, Any]]) -> Iterator[tuple[str, type[Hub]]]:
    """Serve these models. Yields its URL and the handler class, whose ``models``, ``broken`` (a status to answer with),
    ``told`` and ``seen`` a test may look at and change."""
    state: dict[str, Any] = {"models": {m["id"]: m for m in models}, "seen": [], "told": [], "broken": []}
    handler = type("ModelHub", (Hub,), state)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", handler
    finally:
        server.shutdown()
        server.server_close()
