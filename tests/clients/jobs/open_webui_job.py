"""Requests as Open WebUI sends them, whose installation takes gigabytes: streams with usage, functions, a title, and
those of its connections to Ollama."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import job


def ask(path: str, body: dict[str, Any] | None = None) -> str:
    headers = {"Content-Type": "application/json", "Authorization": "Bearer none", "X-OpenWebUI-User-Name": "Jo"}
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(job.URL + path, data, headers), timeout=60) as answer:
        return str(answer.read().decode())


def streamed(body: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The message that the deltas of a stream make, and the usage."""
    message: dict[str, Any] = {"content": "", "tool_calls": {}}
    usage: dict[str, Any] = {}
    lines = [line for line in ask("/v1/chat/completions", body).split("\n") if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    for line in lines[:-1]:
        chunk = json.loads(line[6:])
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            for call in delta.get("tool_calls") or []:
                begun = {"id": call.get("id"), "name": "", "arguments": ""}
                known = message["tool_calls"].setdefault(call["index"], begun)
                known["name"] += call["function"].get("name") or ""
                known["arguments"] += call["function"].get("arguments") or ""
    return message, usage


def models() -> None:
    assert [model["id"] for model in json.loads(ask("/v1/models"))["data"]] == [job.MODEL]


def chat() -> str:
    function = {"name": "read_file", "description": "Read a file", "parameters": job.PARAMETERS}
    body: dict[str, Any] = {
        "stream": True, "model": job.MODEL, "messages": [{"role": "user", "content": job.PROMPT}],
        "tools": [{"type": "function", "function": function}], "stream_options": {"include_usage": True},
    }  # fmt: skip
    message, usage = streamed(body)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    (call,) = message["tool_calls"].values()
    written = {"index": 0, "id": call["id"], "type": "function",
               "function": {"name": call["name"], "arguments": call["arguments"]}}  # fmt: skip
    body["messages"] += [
        {"role": "assistant", "content": message["content"], "tool_calls": [written]},
        {"role": "tool", "tool_call_id": call["id"], "content": job.read_file(**json.loads(call["arguments"]))},
    ]
    return str(streamed(body)[0]["content"])


def title() -> None:
    body = {
        "model": job.MODEL, "messages": [{"role": "user", "content": "### Task: a title"}], "stream": False,
        "max_completion_tokens": 1000,
    }  # fmt: skip
    assert json.loads(ask("/v1/chat/completions", body))["choices"][0]["message"]["content"]


def ollama_models() -> None:
    assert json.loads(ask("/api/version"))["version"]
    (model,) = json.loads(ask("/api/tags"))["models"]
    assert model["model"] == f"{job.MODEL}:latest" and model["size"] is not None
    assert json.loads(ask("/api/ps"))["models"][0]["expires_at"]
    assert json.loads(ask("/api/show", {"model": model["model"]}))["capabilities"]


def ollama_chat() -> str:
    function = {"name": "read_file", "description": "Read a file", "parameters": job.PARAMETERS}
    body: dict[str, Any] = {
        "model": f"{job.MODEL}:latest", "messages": [{"role": "user", "content": job.PROMPT}], "stream": True,
        "options": {"temperature": 0.2, "num_ctx": 2048}, "tools": [{"type": "function", "function": function}],
        "keep_alive": "5m",
    }  # fmt: skip
    for _ in range(2):
        message: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": []}
        for part in map(json.loads, ask("/api/chat", body).splitlines()):
            message["content"] += part["message"]["content"]
            message["tool_calls"] += part["message"].get("tool_calls", [])
        assert part["done"] and part["eval_count"] and part["total_duration"]
        body["messages"].append(message)
        for call in message["tool_calls"]:
            result = job.read_file(**call["function"]["arguments"])
            body["messages"].append({"role": "tool", "tool_call_id": call["id"], "content": result})
    return str(message["content"])


job.run(models, chat, title, ollama_models, ollama_chat)
