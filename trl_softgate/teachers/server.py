"""A teacher that runs elsewhere: a plain `vllm serve`, which scores the tokens of a prompt."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from .base import TeacherError, TeacherRequest
from .http import BYTES_PER_ANSWER, NOT_VLLM, Batch, Client, Retry, Unfit

T = TypeVar("T")

# a token's entry takes about 70 bytes, and more where its text is long
_BYTES_PER_ENTRY = 4096
_DETOKENIZE_CHUNK = 4096
_PROBE_TEXT = "The quick brown fox jumps over the lazy dog, 12 times."
_TOP = 20
# vLLM writes this in place of -inf, which JSON does not have
_MINUS_INFINITY = -9999.0
_ROUNDING = 1e-4


class ServerTeacher:
    """A plain `vllm serve`, spoken to over its OpenAI-compatible HTTP API: token ids in, `prompt_logprobs` out.

    One request per row that has a completion, `concurrency` at once. Time-outs, 429, 5xx, broken connections and
    answers that are none are tried again, with exponential back-off, at the next URL.

    Args:
        urls: of one server, or of several with the same model that share the rows, e.g. "http://127.0.0.1:8000"; with
            or without `/v1` at the end. `user:password@` is sent as basic authentication.
        tokenizer: the student's; `probe` holds the server's against it.
        temperature: must be 1, the only one a server scores at.
        model: name under which the server has the model; default: the only one there.
        api_key_env: name of the environment variable that holds the API key.
        concurrency: requests at once over all URLs, >= 1.
        timeout: seconds, > 0, from the begin of a request to the last byte of its answer.
        max_retries: further attempts after the first, >= 0.

    Raises:
        ValueError: an option is out of range, a URL is none, or the variable of `api_key_env` is not set.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        tokenizer: Any,
        temperature: float = 1.0,
        model: str | None = None,
        api_key_env: str | None = None,
        concurrency: int = 16,
        timeout: float = 120.0,
        max_retries: int = 5,
    ) -> None:
        if temperature != 1:
            raise ValueError(
                f"A server scores at temperature 1 alone, got {temperature!r}: sample with `temperature=1`, or state "
                "`teacher_temperature=1`."
            )
        self._client = Client(
            urls, api_key_env=api_key_env, concurrency=concurrency, timeout=timeout, max_retries=max_retries
        )
        self.urls = self._client.urls
        self.model = model
        self.temperature = 1.0
        self._tokenizer = tokenizer
        self._limit: int | None = None

    def __repr__(self) -> str:
        return f"ServerTeacher(urls={self.urls!r}, model={self.model!r})"

    def __call__(self, request: TeacherRequest) -> torch.Tensor:
        """(B, T) float32 log-probabilities at temperature 1, see `start`."""
        return self.start(request)()

    def start(self, request: TeacherRequest) -> Callable[[], torch.Tensor]:
        """Send the rows in the background. Rows without a completion are not sent.

        Returns:
            A function that waits for the answers: (B, T) float32 on the request's device, 0 on padding, NaN where the
            server has no finite value. It raises `TeacherError`, and the other requests end, when a row has failed.

        Raises:
            ValueError: the request has another temperature than 1.
            TeacherError: a row has no prompt, or is longer than what the server said it takes (see `probe`).
        """
        if request.temperature != self.temperature:
            raise ValueError(
                f"A server scores at temperature 1 alone, the rollout was sampled at {request.temperature}: sample "
                "with `temperature=1`, or state `teacher_temperature=1`."
            )
        rows = _unpad(request)
        for i, prompt, completion in rows:
            self._check_row(i, len(prompt), len(completion))
        tasks = [
            functools.partial(self._score_row, self._client.urls_in_turn(), prompt, completion)
            for _, prompt, completion in rows
        ]
        batch = self._client.batch(tasks)

        def result() -> torch.Tensor:
            mask = request.completion_mask.bool().cpu()
            scores = torch.zeros(mask.shape, dtype=torch.float32)
            for (i, _, _), values in zip(rows, batch.results(), strict=True):
                scores[i, mask[i]] = torch.from_numpy(values)
            return scores.to(request.completion_ids.device)

        return result

    def probe(self, min_context: int) -> None:
        """Ask every server, before anything depends on it, whether it can be this student's teacher.

        Args:
            min_context: tokens of the longest prompt and completion together.

        Raises:
            ValueError: the model is not served, the context is too short, the vocabulary differs, or the numbers are
                no log-probabilities. Says with which option to start the server.
            TeacherError: a server does not answer.
        """
        tasks = [functools.partial(self._probe_url, url, min_context) for url in self.urls]
        try:
            found = self._client.batch(tasks).results()
        except Unfit as error:
            raise ValueError(str(error)) from None
        names = [name for name, _ in found]
        if len(set(names)) > 1:
            served = ", ".join(f"{name!r} at {url}" for url, name in zip(self.urls, names, strict=True))
            raise ValueError(
                f"The servers have different models: {served}. Start them with the same `--served-model-name`, or "
                "give `teacher_server_url` of one model."
            )
        self.model = names[0]
        self._limit = min(limit for _, limit in found) - 1

    def _check_row(self, i: int, prompt: int, completion: int) -> None:
        if prompt == 0:
            raise TeacherError(
                f"Row {i} has an empty prompt: a server scores each token from those before it, so the first has no "
                "value. Give every row a prompt of at least one token."
            )
        if self._limit is not None and prompt + completion > self._limit:
            raise TeacherError(
                f"Row {i} has {prompt} prompt and {completion} completion tokens, the server takes {self._limit} "
                f"together: start it with `--max-model-len {prompt + completion + 1}`, or shorten the prompts."
            )

    def _score_row(self, urls: list[str], prompt: list[int], completion: list[int], batch: "Batch") -> np.ndarray:
        ids = prompt + completion
        hint = (
            f"The row has {len(prompt)} prompt and {len(completion)} completion tokens; if that is too long, start "
            f"the server with `--max-model-len {len(ids) + 1}` or more."
        )
        return self._score(batch, urls, ids, 0, hint, functools.partial(_completion_values, ids, len(prompt)))

    def _score(
        self,
        batch: "Batch",
        urls: Sequence[str],
        ids: list[int],
        top: int,
        hint: str,
        read: Callable[[str, list[Any]], T],
    ) -> T:
        # no `max_tokens: 0`: vLLM refuses it
        body: dict[str, Any] = {"prompt": ids, "max_tokens": 1, "temperature": 1, "prompt_logprobs": top}
        if self.model is not None:
            body["model"] = self.model
        return self._client.ask(
            batch,
            urls,
            "/v1/completions",
            lambda url, answer: read(url, _prompt_logprobs(url, answer, len(ids))),
            body,
            hint=hint,
            max_bytes=BYTES_PER_ANSWER + _BYTES_PER_ENTRY * len(ids) * (top + 1),
        )

    def _probe_url(self, url: str, min_context: int, batch: "Batch") -> tuple[str, int]:
        served = self._client.ask(batch, [url], "/v1/models", _served_models)
        name = self.model
        if name is None:
            if len(served) != 1:
                raise ValueError(
                    f"The server at {url} has {len(served)} models ({', '.join(map(repr, served))}): say which one is "
                    "the teacher with `teacher_server_model`."
                )
            name = next(iter(served))
        elif name not in served:
            raise ValueError(
                f"The server at {url} does not have the model {name!r}, but {', '.join(map(repr, served))}: give one "
                f"of these as `teacher_server_model`, or start it with `--served-model-name {name}`."
            )
        limit = served[name]
        if limit is None:
            raise ValueError(f"The server at {url} does not say `max_model_len` at /v1/models. {NOT_VLLM}")
        if limit - 1 < min_context:
            raise ValueError(
                f"The server at {url} takes {limit - 1} tokens, and prompt and completion may have {min_context} "
                f"together: start it with `--max-model-len {min_context + 1}`."
            )
        self._probe_vocabulary(batch, url, name)
        self._probe_numbers(batch, url, limit)
        return name, limit

    def _probe_vocabulary(self, batch: "Batch", url: str, name: str) -> None:
        def there(ids: list[int]) -> str:
            body = {"model": name, "tokens": ids}
            max_bytes = BYTES_PER_ANSWER + _BYTES_PER_ENTRY * len(ids)
            return self._client.ask(batch, [url], "/detokenize", _detokenized, body, max_bytes=max_bytes)

        def here(ids: list[int]) -> str:
            # vLLM decodes with special tokens
            return self._tokenizer.decode(ids, skip_special_tokens=False)

        vocabulary = self._tokenizer.get_vocab()
        # some tokenizers drop a space at the begin of a text; behind another token they keep it
        anchor = self._tokenizer.encode("a", add_special_tokens=False)[-1:]
        found = _first_difference(there, here, [anchor], [])
        for items in ([[i] for i in sorted(set(vocabulary.values()))], _characters_of_bytes(vocabulary)):
            for begin in range(0, len(items), _DETOKENIZE_CHUNK):
                found = found or _first_difference(there, here, items[begin : begin + _DETOKENIZE_CHUNK], anchor)
        if found:
            context = [] if here(found) != there(found) else anchor
            what = f"id {found[0]} is" if len(found) == 1 else f"the ids {found} are"
            raise ValueError(
                f"The vocabulary of the server at {url} differs from the student's: {what} "
                f"{here(context + found)!r} for the student and {there(context + found)!r} for the server. Serve a "
                "model of the same tokenizer family."
            )

    def _probe_numbers(self, batch: "Batch", url: str, limit: int) -> None:
        ids = self._tokenizer.encode(_PROBE_TEXT, add_special_tokens=False)[: limit - 1]
        rows = 2 * len(self._tokenizer)
        try:
            self._score(batch, [url], ids, _TOP, "", lambda url, answer: _check_numbers(url, answer, ids, rows))
        except Unfit as error:
            if error.status == 400 and "logprobs" in error.answer:
                raise ValueError(
                    f"The server at {url} does not give {_TOP} log-probabilities per token, which the check of its "
                    f"numbers needs ({error.answer}): start it with `--max-logprobs {_TOP}`."
                ) from None
            raise


def _unpad(request: TeacherRequest) -> list[tuple[int, list[int], list[int]]]:
    """(row, prompt ids, completion ids) of each row that has a completion."""
    prompts, prompt_mask = request.prompt_ids.cpu().numpy(), request.prompt_mask.bool().cpu().numpy()
    completions, completion_mask = request.completion_ids.cpu().numpy(), request.completion_mask.bool().cpu().numpy()
    return [
        (i, prompts[i][prompt_mask[i]].tolist(), completions[i][completion_mask[i]].tolist())
        for i in range(len(completions))
        if completion_mask[i].any()
    ]


def _served_models(url: str, answer: Any) -> dict[str, int | None]:
    """Name -> `max_model_len`; an adapter has that of its base."""
    try:
        cards = {card["id"]: card for card in answer["data"]}
        lengths = {name: card.get("max_model_len") for name, card in cards.items()}
        return {name: lengths[name] or lengths.get(card.get("parent")) for name, card in cards.items()}
    except (KeyError, TypeError, AttributeError):
        raise Retry("the answer is no list of models", NOT_VLLM) from None


def _detokenized(url: str, answer: Any) -> str:
    if not isinstance(answer, dict) or not isinstance(answer.get("prompt"), str):
        raise Retry("the answer has no text in `prompt`", NOT_VLLM)
    return answer["prompt"]


def _prompt_logprobs(url: str, answer: Any, length: int) -> list[Any]:
    """The `length` entries of `prompt_logprobs`: null, then one object per token.

    Raises:
        Retry: the answer is no completion.
        Unfit: it is one, without such a list.
    """
    try:
        (choice,) = answer["choices"]
        entries = choice.get("prompt_logprobs")
    except (KeyError, TypeError, ValueError, AttributeError):
        raise Retry("the answer is no completion", NOT_VLLM) from None
    problem = None
    if not isinstance(entries, list):
        problem = "has no `prompt_logprobs`"
    elif len(entries) != length:
        problem = f"has {len(entries)} `prompt_logprobs` for {length} tokens"
    elif not all(isinstance(entry, dict) for entry in entries[1:]):
        problem = "has `prompt_logprobs` without a value after the first token"
    if problem is not None:
        raise Unfit(
            f"The answer of the teacher at {url} {problem}, so it cannot be used. {NOT_VLLM} Other servers accept "
            "the request and leave the field out."
        )
    return entries


def _completion_values(ids: list[int], prompt: int, url: str, entries: list[Any]) -> np.ndarray:
    """(len(ids) - prompt,) float32: the value of each completion token, NaN where it is not finite.

    Raises:
        Unfit: an entry lacks its token, or holds something else than a number, or a number above 0.
    """
    tokens = zip(entries[prompt:], ids[prompt:], strict=True)
    scores = _numbers(url, lambda: [entry[str(i)]["logprob"] for entry, i in tokens])
    scores[~np.isfinite(scores) | (scores == _MINUS_INFINITY)] = np.nan
    if (scores > _ROUNDING).any():
        raise _no_logprobs(url, f"a token has the value {np.nanmax(scores):.4g}, above 0")
    return scores.astype(np.float32)


def _check_numbers(url: str, entries: list[Any], ids: list[int], rows: int) -> None:
    """Refuse values that are no log-probabilities, from the `_TOP` best of each position.

    Logits are told by their sums: the probabilities of the best `_TOP` of V tokens are together at most 1, and at
    least `_TOP` / V. `rows` is an upper bound of V.

    Raises:
        Unfit: with the option to start the server with.
    """
    finite = np.isfinite(_completion_values(ids, 1, url, entries)).all()
    for entry in entries[1:]:
        values = _numbers(url, lambda entry=entry: [value["logprob"] for value in entry.values()])
        best = np.sort(values)[::-1][:_TOP]
        if len(best) < _TOP:
            raise Unfit(f"The server at {url} gave {len(best)} values where {_TOP} were asked for. {NOT_VLLM}")
        if not (finite and np.isfinite(best).all()):
            raise Unfit(
                f"The server at {url} gives values that are not finite for a plain text: its model overflows. Start "
                "it with `--dtype float32` or `--dtype bfloat16`."
            )
        if best[0] > _ROUNDING:
            raise _no_logprobs(url, f"a token has the value {best[0]:.4g}, above 0")
        total = float(np.exp(best).sum())
        if total > 1 + 10 * _ROUNDING or total < _TOP / rows:
            raise _no_logprobs(url, f"the best {_TOP} tokens of a position have probability {total:.4g} together")


def _numbers(url: str, collect: Callable[[], list[Any]]) -> np.ndarray:
    """The collected `logprob`s as float64; null is NaN."""
    try:
        values = collect()
    except (KeyError, TypeError):
        raise Unfit(
            f"The answer of the teacher at {url} lacks a token that was sent: `prompt_logprobs` must hold each "
            f"token's id with its `logprob`. {NOT_VLLM}"
        ) from None
    if not set(map(type, values)) <= {float, int, type(None)}:
        raise Unfit(f"The teacher at {url} gave a `logprob` that is no number. {NOT_VLLM}")
    try:
        return np.array(values, dtype=np.float64)
    except OverflowError:
        raise Unfit(f"The teacher at {url} gave a `logprob` beyond float64. {NOT_VLLM}") from None


def _no_logprobs(url: str, what: str) -> Unfit:
    return Unfit(
        f"The numbers of the server at {url} are no log-probabilities: {what}. Start it with `--logprobs-mode "
        "raw_logprobs`, vLLM's default."
    )


def _first_difference(
    there: Callable[[list[int]], str], here: Callable[[list[int]], str], items: list[list[int]], anchor: list[int]
) -> list[int] | None:
    """The first of the id lists that both sides decode to different texts, behind `anchor`.

    None where only the joins differ: that is a matter of clean-up between tokens.
    """
    ids = [*anchor, *itertools.chain.from_iterable(items)]
    if there(ids) == here(ids):
        return None
    if len(items) == 1:
        return items[0]
    half = len(items) // 2
    return _first_difference(there, here, items[:half], anchor) or _first_difference(there, here, items[half:], anchor)


def _characters_of_bytes(vocabulary: dict[str, int]) -> list[list[int]]:
    """For each token that is a part of a character: ids that make it whole, since by itself it decodes to U+FFFD.

    A token of bytes that no text has is left out.
    """
    table = _byte_table(vocabulary)
    single = {byte: vocabulary[token] for token, byte in table.items() if token in vocabulary}
    items = []
    for token, i in sorted(vocabulary.items(), key=lambda item: item[1]):
        if token in table:
            part = bytes([table[token]])
        elif all(character in table for character in token):
            part = bytes(table[character] for character in token)
        else:
            continue
        if _is_text(part):
            continue
        for before, after in itertools.product(_BEFORE, _AFTER):
            if _is_text(before + part + after) and all(byte in single for byte in before + after):
                items.append([*(single[byte] for byte in before), i, *(single[byte] for byte in after)])
                break
    return items


# what may stand before 0 to 3 bytes that continue a character, and after its first byte or bytes
_BEFORE = [b"", b"\xc3", b"\xe1", b"\xf1"]
_AFTER = [b"", *(first + b"\x80" * more for more in range(3) for first in (b"\x80", b"\x90", b"\xa0"))]


def _is_text(part: bytes) -> bool:
    try:
        part.decode()
    except UnicodeDecodeError:
        return False
    return True


def _byte_table(vocabulary: dict[str, int]) -> dict[str, int]:
    """How the vocabulary spells bytes: "<0xC3>" with byte fallback, else the printable stand-ins of byte-level BPE."""
    fallback = {f"<0x{byte:02X}>": byte for byte in range(256)}
    if fallback.keys() <= vocabulary.keys():
        return fallback
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
