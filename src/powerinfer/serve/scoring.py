"""The logprobs of a prompt's own tokens, which `echo` with `logprobs` asks for."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from powerinfer.errors import RequestError
from powerinfer.runtime.sampling import TokenLogprob, token_logprob
from powerinfer.serve.api_error import ApiError
from powerinfer.serve.shapes import Echo, Logprobs, add_logprobs, text_logprobs

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from powerinfer.runtime.engine import LLM

_thread = ThreadPoolExecutor(1, thread_name_prefix="scoring")  # one prompt at a time: each takes its cache pages


class _Stopped(Exception):
    """Nobody waits for the scores any more."""


async def score(llm: LLM, tokens: list[int], count: int) -> list[TokenLogprob | None]:
    """Logprob of each token and those of the `count` most likely ones; None for the first.

    The tokens must be valid and fit the context. ApiError (503) if the cache has no room for them now.
    """
    stop = threading.Event()
    loop = asyncio.get_running_loop()
    try:
        return await loop.run_in_executor(_thread, _score, llm, tokens, count, stop)
    except asyncio.CancelledError:
        stop.set()
        raise


def _score(llm: LLM, tokens: list[int], count: int, stop: threading.Event) -> list[TokenLogprob | None]:
    scores: list[TokenLogprob | None] = [None]
    scratch = np.empty(llm.config.vocab_size, np.float32)

    def use(position: int, logits: NDArray[np.float32]) -> None:
        if stop.is_set():
            raise _Stopped
        for row, token in zip(logits, tokens[position + 1 :], strict=False):
            scores.append(token_logprob(row, token, count, llm.tokenizer.token_bytes, scratch))

    if len(tokens) > 1:
        try:
            llm.score(tokens[:-1], 0, use)  # the last token's logits are of what follows
        except RequestError as error:  # the prompt is fine: there is no room, or no engine any more
            raise ApiError(503, str(error), code="busy") from None
    return scores


async def echo_of(llm: LLM, prompt: str | list[int], tokens: list[int], count: int | None) -> Echo:
    """A prompt as the beginning of its answer; count None: without logprobs."""
    is_text = isinstance(prompt, str)
    text = prompt if isinstance(prompt, str) else llm.tokenizer.decode(tokens, skip_special=False)
    if count is None:
        return Echo(text, None)
    decoder = llm.tokenizer.stream(skip_special=False)
    total: Logprobs | None = None
    at = 0
    for number, (token, logprobs) in enumerate(zip(tokens, await score(llm, tokens, count), strict=True)):
        total = add_logprobs(total, text_logprobs(llm.tokenizer, token, logprobs, at))
        # the token that encoding puts before a text is not in the text
        if not (is_text and number == 0 and token == llm.tokenizer.bos_id):
            at += len(decoder.push(token))
    return Echo(text, total)
