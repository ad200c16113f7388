"""A local HTTP server with the few routes of the Hugging Face Hub that the client requests."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LFS_FROM_BYTES = 10_000


@dataclass
class Hub:
    """The server's repositories and address."""

    repositories: dict[str, dict[str, bytes]]
    """`models/org/name` or `datasets/org/name` → path → content."""
    url: str = ""
    requests: list[str] = field(default_factory=list)
    sends: dict[str, bytes] = field(default_factory=dict)
    """By route of a file: other content to send."""
    private: dict[str, bool] = field(default_factory=dict)
    """By name of a repository that the client made: whether it is private."""


def blob(content: bytes) -> dict:
    """A file's size and ids as the hub's API gives them."""
    git = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
    digest = hashlib.sha256(content).hexdigest()
    lfs = {"size": len(content), "sha256": digest, "oid": digest, "pointerSize": 130}
    return {"size": len(content), "oid": git, **({"lfs": lfs} if len(content) >= LFS_FROM_BYTES else {})}


def entries(files: dict[str, bytes], below: str, is_recursive: bool) -> list[dict]:
    """A listing of a directory: files, and the directories above them."""
    found: dict[str, dict] = {}
    for path, content in files.items():
        parts = PurePosixPath(path).parts
        for k in range(1, len(parts)):
            found["/".join(parts[:k])] = {"type": "directory", "path": "/".join(parts[:k]), "oid": COMMIT, "size": 0}
        found[path] = {"type": "file", "path": path, **blob(content)}
    inside = [entry for name, entry in found.items() if not below or name.startswith(f"{below}/")]
    return [one for one in inside if is_recursive or "/" not in one["path"].removeprefix(f"{below}/" if below else "")]


class Handler(BaseHTTPRequestHandler):
    """Answers repository, tree and file requests for the one commit."""

    hub: Hub

    def log_message(self, *arguments) -> None:
        """Log nothing."""

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def do_POST(self) -> None:
        self.answer()

    def answer(self) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        self.hub.requests.append(path)
        if path.startswith("api/"):
            self.answer_api(path.removeprefix("api/"))
        else:
            where, _, rest = path.partition("/resolve/")
            repository = where if where.startswith("datasets/") else f"models/{where}"
            content = self.hub.repositories[repository].get(rest.partition("/")[2])
            if content is None:
                return self.send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
            ids = blob(content)
            etag = ids["lfs"]["sha256"] if "lfs" in ids else ids["oid"]
            sent = self.hub.sends.get(path, content)
            self.send(200, sent, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT})

    def answer_upload(self, path: str) -> bool:
        """Answer the requests with which the client makes a repository and uploads small files to it."""
        kind, *rest = path.split("/")
        if path not in ("repos/create", "validate-yaml") and rest[2:3] not in (["preupload"], ["commit"]):
            return False
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        if path == "repos/create":
            wanted = json.loads(body)
            name = f"{wanted['organization']}/{wanted['name']}"
            self.hub.repositories.setdefault(f"models/{name}", {})
            self.hub.private[name] = wanted.get("private", wanted.get("visibility") == "private")
            answer: dict = {"url": f"{self.hub.url}/{name}", "name": name}
        elif path == "validate-yaml":
            answer = {"errors": [], "warnings": []}
        elif rest[2] == "preupload":
            paths = [file["path"] for file in json.loads(body)["files"]]
            files = [{"path": path, "uploadMode": "regular", "shouldIgnore": False, "oid": None} for path in paths]
            answer = {"files": files}
        else:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    content = base64.b64decode(line["value"]["content"])
                    self.hub.repositories[f"{kind}/{rest[0]}/{rest[1]}"][line["value"]["path"]] = content
            answer = {"success": True, "commitOid": COMMIT, "commitUrl": f"{self.hub.url}/{rest[0]}/{rest[1]}"}
            answer["commitUrl"] += f"/commit/{COMMIT}"
        self.send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})
        return True

    def answer_api(self, path: str) -> None:
        if self.command == "POST" and self.answer_upload(path):
            return None
        if path.count("/") < 2:
            return self.send(404, b"{}")
        kind, org, name, *rest = path.split("/")
        files = self.hub.repositories.get(f"{kind}/{org}/{name}")
        if org == "gated":
            return self.send(403, b"{}", {"X-Error-Code": "GatedRepo"})
        if files is None:
            return self.send(401, b"{}", {"X-Error-Code": "RepoNotFound"})
        if rest and rest[1] not in (COMMIT, "main", "v1"):
            return self.send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        if rest and rest[0] == "tree":
            below = "/".join(rest[2:])
            return self.send(200, json.dumps(entries(files, below, "recursive=true" in self.path.lower())).encode())
        if rest and rest[0] == "paths-info":
            length = int(self.headers["Content-Length"])
            body = self.rfile.read(length).decode()
            is_json = body.startswith("{")
            wanted = json.loads(body)["paths"] if is_json else parse_qs(body)["paths"]
            found = [entry for entry in entries(files, "", True) if entry["path"] in wanted]
            return self.send(200, json.dumps(found).encode())
        siblings = []
        for file, content in files.items():
            ids = blob(content)
            siblings.append({"rfilename": file, "blobId": ids.pop("oid"), **ids})
        about = {"_id": "1", "id": f"{org}/{name}", "sha": COMMIT, "siblings": siblings}
        return self.send(200, json.dumps(about | {"private": False, "downloads": 0, "tags": []}).encode())

    def send(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


@contextmanager
def serve(repositories: dict[str, dict[str, bytes]]) -> Iterator[Hub]:
    """Serve these repositories while the block runs."""
    hub = Hub(repositories)
    handler = type("Bound", (Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()


def use_hub(monkeypatch: pytest.MonkeyPatch, hub: Hub, cache: Path) -> None:
    """Let the hub's client in this process know only this server, with an empty cache."""
    constants = {"ENDPOINT": hub.url, "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": False}
    constants["HUGGINGFACE_CO_URL_TEMPLATE"] = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    for name, value in constants.items():
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
