"""A loopback server with as much of the hub's HTTP interface as streaming a parquet data set and loading a model take."""

import io
import json
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pyarrow
import pyarrow.parquet

COMMIT = "c0ffee" + "0" * 34
FILE = "data/{split}-00000-of-00001.parquet"


def _parquet(documents: list[str]) -> bytes:
    sink = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": documents}), sink, row_group_size=50)
    return sink.getvalue()


class _Hub(BaseHTTPRequestHandler):
    files: dict[str, bytes]
    file: str
    models: dict[str, Path]  # repository → folder
    requests: list[str]
    busy: threading.Event  # while set, everything is answered 429
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def _send(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), "X-Repo-Commit": COMMIT, **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _json(self, content: object, status: int = 200) -> None:
        self._send(status, json.dumps(content).encode(), Content_Type="application/json")

    def do_GET(self) -> None:
        self.requests.append(f"{self.command} {self.path}")
        path = self.path.split("?")[0]
        if self.busy.is_set():
            self._send(429, b"{}", Retry_After="0")
            return
        if path.split("/")[1:2] != ["datasets"] and not path.startswith("/api/datasets"):
            self._model(path)
            return
        match = re.match(r"/(api/)?datasets/(\w+/\w+)(?:/(revision|tree|resolve|paths-info)/[^/]+)?/?(.*)$", path)
        content = self.files.get(match[2]) if match else None
        if match is None or content is None:
            self._send(404, b"{}", X_Error_Code="RepoNotFound", X_Error_Message="Repository not found")
        elif match[3] == "resolve":
            self._resolve(match[4], content)
        elif match[3] in ("tree", "paths-info"):
            length = int(self.headers.get("Content-Length") or 0)
            asked = self.rfile.read(length).decode() if length else match[4]
            self._json(_entries(match[4] if match[3] == "tree" else asked, self.file, len(content), self.path))
        else:
            self._json({"id": match[2], "sha": COMMIT, "private": False, "tags": [], "siblings": [{"rfilename": self.file}]})

    do_POST = do_HEAD = do_GET

    def _model(self, path: str) -> None:
        match = re.match(r"/(?:api/models/)?([\w.-]+/[\w.-]+)(?:/(revision|tree|resolve)/[^/]+)?/?(.*)$", path)
        folder = self.models.get(match[1]) if match else None
        if match is None or folder is None:
            self._send(404, b"{}", X_Error_Code="RepoNotFound", X_Error_Message="Repository not found")
        elif match[2] == "resolve":
            if (folder / match[3]).is_file():
                self._file((folder / match[3]).read_bytes(), f'"{match[3]}"')
            else:
                self._send(404, b"", X_Error_Code="EntryNotFound", X_Error_Message="Entry not found")
        elif match[2] == "tree":
            names = sorted(path.name for path in folder.iterdir())
            self._json([{"type": "file", "path": n, "size": (folder / n).stat().st_size, "oid": n} for n in names])
        else:
            self._json({"id": match[1], "sha": COMMIT, "private": False, "tags": [], "siblings": []})

    def _resolve(self, name: str, content: bytes) -> None:
        if name != self.file:
            self._send(404, b"", X_Error_Code="EntryNotFound", X_Error_Message="Entry not found")
            return
        self._file(content, '"f11e"')

    def _file(self, content: bytes, etag: str) -> None:
        headers = {"ETag": etag, "Accept_Ranges": "bytes"}
        asked = re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if asked is None:
            self._send(200, content, **headers)
            return
        first, last = int(asked[1]), min(int(asked[2] or len(content) - 1), len(content) - 1)
        headers["Content_Range"] = f"bytes {first}-{last}/{len(content)}"
        self._send(206, content[first : last + 1], **headers)


def _entries(asked: str, name: str, size: int, path: str) -> list[dict[str, object]]:
    file = {"type": "file", "path": name, "size": size, "oid": "f11e"}
    folder = {"type": "directory", "path": "data", "size": 0, "oid": "d1"}
    if "recursive=True" in path or "recursive=true" in path:
        return [folder, file]
    if "data" in asked:
        return [file] if asked.startswith("data") or name.replace("/", "%2F") in asked or name in asked else [folder]
    return [folder] if asked == "" else []


@contextmanager
def hub(
    data_sets: dict[str, list[str]],
    split: str = "train",
    models: dict[str, Path] | None = None,
    busy: threading.Event | None = None,
) -> Iterator[dict[str, str]]:
    """Serve data sets (name → documents, all of one split) and models (name → folder), 429 to everything while ``busy``.

    Yields the environment of a process that takes this server for the hub.
    """
    files = {name: _parquet(texts) for name, texts in data_sets.items()}
    told = {"models": models or {}, "busy": busy or threading.Event()}
    handler = type("Hub", (_Hub,), {"files": files, "file": FILE.format(split=split), "requests": [], **told})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith("HF_") and "proxy" not in name.lower()
    }
    endpoint = f"http://127.0.0.1:{server.server_port}"
    try:
        yield kept | {"HF_ENDPOINT": endpoint, "PYTHONPATH": os.getcwd(), "HF_HUB_DISABLE_XET": "1"}
    finally:
        server.shutdown()
        server.server_close()
