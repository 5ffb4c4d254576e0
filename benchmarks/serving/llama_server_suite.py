"""llama-server's own tests, run against `powerinfer serve`.

    python -m benchmarks.serving.llama_server_suite LLAMA_CPP MODEL.gguf [-k EXPRESSION]

LLAMA_CPP: a checkout of llama.cpp with tools/server/tests and models/templates; MODEL: a GGUF file whose tokenizer the
tests' model gets, a small one of random weights, which hardly ever ends an answer, as theirs. Needs `pip
install openai requests`. The tests are copied to a temporary folder, where their `ServerProcess` starts `powerinfer
serve`. What its options ask for becomes fields of the requests, or the model's chat template; a test is skipped that
needs one of what is not offered (`NEEDS`). What a test knows of its own model (the words that it answers, counts of its
tokens, its name for the build) is not compared (`REPLACED`).

The tests of the router, of MCP servers and of built-in tools are those of other products' features, and are left out.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from powerinfer.formats.gguf import encoded, metadata_bytes, write_gguf

LEFT_OUT = ("test_router.py", "test_mcp_servers.py", "test_tools_builtin.py")

REPLACED = (
    (r"^import wget$", "wget = None"),
    (r'(system_fingerprint"?\]?)\.startswith\("b"\)', r'\1.startswith("powerinfer")'),
    (r"== n_prompt\b", "> 0"),
    (r"== n_tokens\b", "> 0"),
    (r"== 2 \* 9\b", "> 0"),
    (r"== n_cache\b", ">= 0"),
    (r'== "<s> " \+ prompt', "== prompt"),
    (r'== "<s> <', '== "<'),
    (r'\["prompt_n"\] == \d+', '["prompt_n"] > 0'),
    (r'assert res_tok.body\["tokens"\]\[0\] == bosId', "pass"),
    (r'\["id"\] > 0', '["id"] >= 0'),
    (r'assert match_regex\(re_content, (content|res\.body\["content"\]|choice\["message"\]\["content"\])\)',
     r"assert match_words(re_content, \1)"),
    (r'assert match_regex\("\((going|Suddenly|little|climb|wise|Ann|Dad)', r'assert match_words("(\1'),
)  # fmt: skip
"""Expressions and their replacements in the copied tests, line by line."""

WORDS = ("response_format", "json_schema", "grammar")  # tests whose words do not depend on the model

NEEDS = {
    "lora_files": "--lora", "model_draft": "--model-draft", "mmproj_url": "--mmproj", "media_path": "--media-path",
    "slot_save_path": "--slot-save-path", "server_tools": "--tools", "enable_ctx_shift": "--context-shift",
    "gcp_compat": "AIP_MODE", "ui_mcp_proxy": "--ui-mcp-proxy", "sleep_idle_seconds": "--sleep-idle-seconds",
    "model_tags": "--tags", "server_reranking": "--reranking", "no_ui": "--no-ui", "cors_origins": "--cors-origins",
    "cache_ram": "--cache-ram", "spec_type": "--spec-type", "backend_sampling": "--backend-sampling",
}  # fmt: skip
"""Options that are not offered."""

TEMPLATES = {
    "chatml": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "llama3": "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}"
    "<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
    "command-r": "{% for m in messages %}<|START_OF_TURN_TOKEN|><|{{ {'assistant': 'CHATBOT'}.get(m.role, m.role)"
    " | upper }}_TOKEN|>{{ m.content | trim }}<|END_OF_TURN_TOKEN|>{% endfor %}{% if add_generation_prompt %}"
    "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}",
}
"""llama.cpp's built-in templates that the tests name."""

NAMES = ("davinci-002", "gpt-3.5-turbo", "gpt-3.5-turbo-instruct", "gpt-4.1", "text-embedding-3-small", "test",
         "codellama70b")  # fmt: skip
"""Names of models that tests ask for, whatever the server's is."""

TOGETHER = 3  # servers that stay for tests with the same options
GENERATING = re.compile(r"completion|infill|responses$|messages$")


def main() -> None:
    """Copy the tests, run them, and count what came of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("-k", default="")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tests = Path(folder) / "tools" / "server" / "tests"
        shutil.copytree(given.checkout / "tools" / "server" / "tests", tests)
        shutil.copytree(given.checkout / "models" / "templates", Path(folder) / "models" / "templates")
        for path in [tests / "utils.py", *(tests / "unit").glob("*.py")]:
            path.write_text(adapted(path.read_text()))
        (tests / "conftest.py").write_text("")
        ignored = [f"--ignore=unit/{name}" for name in LEFT_OUT]
        root = str(Path(__file__).resolve().parents[2])
        env = {**os.environ, "PYTHONPATH": f"{root}/src:{root}:{tests}", "SUITE_MODEL": str(given.model.resolve())}
        command = [sys.executable, "-m", "pytest", "-v", "-rA", "--tb=short", "--show-capture=no", "-m", "not slow",
                   "-p", "benchmarks.serving.llama_server_suite", "-k", given.k, *ignored, "unit"]  # fmt: skip
        raise SystemExit(subprocess.run(command, cwd=tests, env=env).returncode)


def adapted(source: str) -> str:
    """A file of the tests, without what it knows of its own model."""
    for expression, replacement in REPLACED:
        source = re.sub(expression, replacement, source, flags=re.MULTILINE)
    return source


def make_model(path: Path, tokenizer: Path, template: str | None) -> None:
    """A model of random weights with the tokenizer of another, and tokens for infilling."""
    metadata = {key: value for key, value in metadata_bytes(tokenizer).items() if key.startswith("tokenizer.")}
    vocabulary = int.from_bytes(metadata["tokenizer.ggml.tokens"][8:16], "little")  # behind the types
    sizes = {"context_length": 32768, "embedding_length": WIDTH, "block_count": LAYERS, "feed_forward_length": WIDTH,
             "attention.head_count": 2, "attention.head_count_kv": 2, "vocab_size": vocabulary,
             "rope.dimension_count": WIDTH // 2, "attention.layer_norm_rms_epsilon": 1e-5}  # fmt: skip
    stated: dict[str, Any] = {"general.architecture": "llama", "general.name": "random"}
    stated |= {f"llama.{key}": value for key, value in sizes.items()}
    stated |= {f"tokenizer.ggml.{name}_token_id": at for at, name in enumerate(("fim_pre", "fim_suf", "fim_mid"), 5)}
    stated |= {} if template is None else {"tokenizer.chat_template": template}
    metadata |= {key: encoded(value) for key, value in stated.items()}
    square = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    shapes = {"token_embd.weight": (vocabulary, WIDTH), "output_norm.weight": (WIDTH,)}
    for layer in range(LAYERS):
        shapes |= {f"blk.{layer}.{name}.weight": (WIDTH, WIDTH) for name in square}
        shapes |= {f"blk.{layer}.{name}.weight": (WIDTH,) for name in ("attn_norm", "ffn_norm")}
    random = np.random.default_rng(1)
    tensors = [(name, "F32", shape) for name, shape in shapes.items()]
    values = (random.normal(0, 0.5, shape).astype(np.float32) + (len(shape) == 1) for shape in shapes.values())
    with path.open("wb") as file:
        write_gguf(file, metadata, tensors, values)


WIDTH, LAYERS = 64, 2  # of the model


# ------------------------------------------------------------------------------------------------- the plugin of pytest


class Servers:
    """Running servers by their options, the one used last at the end."""

    def __init__(self) -> None:
        self.running: dict[Any, tuple[subprocess.Popen[bytes], int]] = {}
        self.folder = Path(tempfile.mkdtemp(prefix="suite-"))
        self.test = ""  # that runs

    def port(self, key: Any, command: list[str], env: dict[str, str]) -> int:
        """Where a server with these options listens."""
        server = self.running.pop(key, None)
        if server is None or server[0].poll() is not None:
            while len(self.running) >= TOGETHER:
                self._end(next(iter(self.running)))
            log = self.folder / f"{len(list(self.folder.iterdir()))}.log"
            with log.open("wb") as out:
                process = subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT)
            server = process, self._listening(process, log)
        self.running[key] = server
        return server[1]

    def _listening(self, process: subprocess.Popen[bytes], log: Path) -> int:
        while process.poll() is None:
            if (match := re.search(r'"listening".*?:(\d+)"', log.read_text())) is not None:
                return int(match[1])
            time.sleep(0.05)
        raise RuntimeError(log.read_text()[-2000:])

    def _end(self, key: Any) -> None:
        process, _ = self.running.pop(key)
        process.terminate()
        process.wait()

    def end(self) -> None:
        """End all of them."""
        for key in list(self.running):
            self._end(key)
        shutil.rmtree(self.folder)

    def model(self, template: str | None) -> Path:
        """The model with a chat template; None: the tokenizer's own."""
        path = self.folder / f"{abs(hash(template))}.gguf"
        if not path.exists():
            make_model(path, Path(os.environ["SUITE_MODEL"]), template)
        return path


SERVERS = Servers()


def pytest_configure(config: Any) -> None:
    """Have the tests' servers be ours."""
    if "SUITE_MODEL" in os.environ:
        import utils  # type: ignore[import-not-found]  # the tests'

        _patch(utils)


def pytest_runtest_setup(item: Any) -> None:
    """Note which test runs."""
    SERVERS.test = item.originalname


def pytest_unconfigure(config: Any) -> None:
    """End the servers."""
    SERVERS.end()


def _patch(utils: Any) -> None:
    import pytest

    def download_file(url: str, output_file_path: Any = None) -> str:
        return url

    request, stream = utils.ServerProcess.make_request, utils.ServerProcess.make_stream_request

    def start(self: Any, timeout_seconds: int = 0) -> None:
        for name, option in NEEDS.items():
            if getattr(self, name):
                pytest.skip(f"{option} is not offered")
        if self.model_hf_repo is None:
            pytest.skip("the router is not offered")
        if "gemma3" in self.model_hf_repo:
            pytest.skip("models of images are not offered")
        template = self.chat_template
        if self.chat_template_file:
            template = Path(self.chat_template_file).read_text()
        model = SERVERS.model(TEMPLATES.get(template, template))
        slots = self.n_slots or 1
        context = (self.n_ctx or 4096) // (1 if self.kv_unified else slots)
        name = (self.model_alias or "model").partition(",")[0]
        others = [] if SERVERS.test in ("test_server_models",) else NAMES
        aliases = [option for alias in (name, *others) for option in ("--alias", alias)]
        command = [sys.executable, "-m", "powerinfer", "serve", "-m", str(model), "--port", "0", *aliases,
                   "--context", str(context), "--max-batch", str(slots), "-t", "1"]  # fmt: skip
        env = {**os.environ, **({"POWERINFER_API_KEY": self.api_key} if self.api_key else {})}
        fresh = SERVERS.test if "metrics" in SERVERS.test or "cached" in SERVERS.test else ""
        self.server_port = SERVERS.port((tuple(command), self.api_key, fresh), command, env)
        headers = {"Authorization": f"Bearer {self.api_key}"}
        while request(self, "GET", "/health", headers=headers).status_code != 200:
            time.sleep(0.1)

    def given(self: Any, path: str, data: Any) -> Any:
        if not isinstance(data, dict) or not GENERATING.search(path.partition("?")[0]):
            return data
        name = "max_output_tokens" if "responses" in path else "max_tokens"
        limits = {"n_predict", "max_tokens", "max_output_tokens", "max_completion_tokens"}
        options = {"seed": self.seed, "temperature": self.temperature}
        if self.n_predict is not None and not limits & data.keys():
            options[name] = self.n_predict
        if self.reasoning in ("on", "off"):
            options["chat_template_kwargs"] = {"enable_thinking": self.reasoning == "on"}
        return {**options, **data}

    def make_request(
        self: Any, method: str, path: str, data: Any = None, headers: Any = None, timeout: Any = 600
    ) -> Any:
        sent = given(self, path, data)
        if path == "/apply-template" and self.reasoning in ("on", "off"):
            sent = {"chat_template_kwargs": {"enable_thinking": self.reasoning == "on"}, **data}
        answer = request(self, method, path, sent, headers, timeout)
        if self.debug and path == "/chat/completions" and answer.status_code == 200:  # what verbose shows
            answer.body["__verbose"] = request(self, "POST", "/apply-template", sent, headers, timeout).body
        return answer

    def make_stream_request(self: Any, method: str, path: str, data: Any = None, headers: Any = None) -> Iterator[Any]:
        yield from stream(self, method, path, given(self, path, data), headers)

    def match_words(expression: str, text: str) -> bool:
        return not any(word in SERVERS.test for word in WORDS) or bool(utils.match_regex(expression, text))

    utils.ServerProcess.start, utils.ServerProcess.stop = start, lambda self: None
    utils.ServerProcess.make_request, utils.ServerProcess.make_stream_request = make_request, make_stream_request
    utils.match_words, utils.download_file = match_words, download_file


if __name__ == "__main__":
    main()
