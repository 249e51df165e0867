"""Scores rows in batches of similar length, so that padding is not pushed through the teacher."""

from collections.abc import Callable
from typing import Any

import torch

from .base import TeacherRequest

_SHORTEST = 0.8

ScoreFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def fused_log_probs(model: Any) -> ScoreFunction:
    """How `score_packed` asks a model that TRL has given a fused LM head."""

    def score(input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return model(input_ids=input_ids, attention_mask=attention_mask, labels=labels, fused_lm_head=True).log_probs

    return score


def pack_rows(lengths: list[int], max_tokens: int) -> list[list[int]]:
    """Row indices, longest first, in batches of rows of similar length.

    Rows times longest row stay within `max_tokens`, and the shortest row is `_SHORTEST` of the longest or more: at
    most a fifth is padding, and lengths that differ by a factor of 100 take 21 batches. A row that is longer than
    `max_tokens` has a batch of its own; an empty row is in none.
    """
    batches: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if lengths[i] == 0:
            continue
        # the first row of a batch is its longest
        longest = lengths[batches[-1][0]] if batches else 0
        if batches and (len(batches[-1]) + 1) * longest <= max_tokens and lengths[i] >= _SHORTEST * longest:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


def score_packed(
    score: ScoreFunction,
    request: TeacherRequest,
    max_tokens: int,
    device: torch.device,
    most: Callable[[int], int] | None = None,
) -> torch.Tensor:
    """Log-probabilities of the completions of `request`, asked for in batches of at most `max_tokens` tokens.

    Args:
        score: (input_ids, attention_mask, labels), each (b, L) and right-padded, labels -100 at tokens that are not
            scored -> (b, L - 1), the log-probability of `labels[:, 1:]`.
        max_tokens: padded tokens per batch, >= 1.
        device: where `score` wants its arguments.
        most: number of batches of this process -> the largest of all processes. Where `score` needs all of them, each
            process calls it that often, with a batch of nothing when it has no more.

    Returns:
        (B, T) float32 on the request's device; 0 on padding, NaN for a token that nothing precedes.
    """
    ids = torch.cat([request.prompt_ids, request.completion_ids], dim=1).to(device)
    prompt_lengths = request.prompt_mask.sum(1)
    completion_lengths = request.completion_mask.sum(1)
    longest_prompt, length = request.prompt_ids.shape[1], request.completion_ids.shape[1]
    total = torch.where(completion_lengths > 0, prompt_lengths + completion_lengths, 0).tolist()
    scores = torch.zeros(len(total), length, dtype=torch.float32, device=device)
    prompt_lengths, completion_lengths = prompt_lengths.to(device), completion_lengths.to(device)
    batches = pack_rows(total, max_tokens)
    for _ in range(0 if most is None else most(len(batches)) - len(batches)):
        nothing = torch.zeros(1, 2, dtype=torch.long, device=device)
        score(nothing, torch.ones_like(nothing), torch.full_like(nothing, -100))
    for rows in batches:
        index = torch.tensor(rows, device=device)
        prompts, completions = prompt_lengths[index, None], completion_lengths[index, None]
        # prompt and completion of a row stand side by side: its tokens are one slice
        place = torch.arange(total[rows[0]], device=device)[None]
        mask = place < prompts + completions
        columns = (longest_prompt - prompts + place).clamp(max=ids.shape[1] - 1)
        input_ids = ids[index].gather(1, columns).masked_fill(~mask, 0)
        labels = input_ids.masked_fill(~mask | (place < prompts), -100)
        log_probs = score(input_ids, mask.long(), labels).float()
        token = torch.arange(length, device=device)[None]
        # a lone token has no log-probability, and no column to take it from
        log_probs = torch.nn.functional.pad(log_probs, (1, 0), value=float("nan"))
        answer = log_probs.gather(1, (prompts + token).clamp(max=log_probs.shape[1] - 1))
        scores[index] = answer.masked_fill(token >= completions, 0.0)
    return scores.to(request.completion_ids.device)
