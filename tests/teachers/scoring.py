"""What the tests of all teachers ask, and the plain answer to it."""

from typing import Any

import tiny
import torch

from trl_softgate.teachers import LocalTeacher, TeacherRequest


def request(temperature: float = 1.0, rows: int = 5, seed: int = 0, pad: int = 0) -> TeacherRequest:
    """Ragged prompts (left-padded) and completions (right-padded), one of length 1 and one of the maximum."""
    generator = torch.Generator().manual_seed(seed)
    prompt_lengths, completion_lengths = [1, 3, 6, 2, 5], [1, 7, 4, 2, 6]
    ids = torch.randint(4, 260, (rows, 13), generator=generator)
    prompt_mask = torch.tensor([[int(6 - n <= i) for i in range(6)] for n in prompt_lengths[:rows]])
    completion_mask = torch.tensor([[int(i < n) for i in range(7)] for n in completion_lengths[:rows]])
    return TeacherRequest(
        ids[:, :6].masked_fill(prompt_mask == 0, pad),
        prompt_mask,
        ids[:, 6:].masked_fill(completion_mask == 0, pad),
        completion_mask,
        temperature,
    )


def reference(model: Any, request: TeacherRequest, vocab_size: int) -> torch.Tensor:
    """Full logits in float64, row by row without padding, softmax over the student's rows; 0 on padding, NaN for a
    token that nothing precedes."""
    model = model.double()
    scores = torch.zeros(request.completion_ids.shape, dtype=torch.float64)
    for i in range(scores.shape[0]):
        prompt = request.prompt_ids[i][request.prompt_mask[i] == 1]
        completion = request.completion_ids[i][request.completion_mask[i] == 1]
        if len(completion) == 0:
            continue
        with torch.no_grad():
            logits = model(input_ids=torch.cat([prompt, completion])[None]).logits[0, :, :vocab_size]
        logps = torch.log_softmax(logits / request.temperature, dim=-1)
        for t, token in enumerate(completion):
            place = len(prompt) + t - 1
            scores[i, t] = logps[place, token] if place >= 0 else float("nan")
    return scores


def local_teacher(model: Any, **kwargs: Any) -> LocalTeacher:
    """A teacher on the CPU for students with `tiny.tokenizer`."""
    defaults: dict[str, Any] = dict(
        temperature=1.0,
        student_vocabulary=tiny.tokenizer().get_vocab(),
        student_vocab_size=300,
        student_eos=1,
        tokenizer=tiny.tokenizer(),
        max_tokens_per_batch=64,
        device=torch.device("cpu"),
    )
    return LocalTeacher(model, **{**defaults, **kwargs})
