"""OpenAI's own client against a server: `openai_client.py http://127.0.0.1:8000`.

Streams completions and chats with logprobs, and checks that tokens, logprobs, usage, several choices, stop strings
and seeds are as the client expects them.
"""

import math
import sys

import openai

PROMPT = "47+38=("
GREEDY = {"temperature": 0, "max_tokens": 12}


def close(left, right):
    return len(left) == len(right) and all(math.isclose(a, b, abs_tol=1e-6) for a, b in zip(left, right))


def completion(client, model):
    """A completion in one piece, and the same as a stream."""
    whole = client.completions.create(model=model, prompt=PROMPT, logprobs=2, **GREEDY)
    choice = whole.choices[0]
    assert choice.finish_reason in ("stop", "length"), choice
    logprobs = choice.logprobs
    assert whole.usage.completion_tokens == len(logprobs.tokens) == len(logprobs.token_logprobs), whole
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    assert all(logprob <= 0 for logprob in logprobs.token_logprobs)
    assert all(len(top) >= 2 for top in logprobs.top_logprobs)
    assert "".join(logprobs.tokens).startswith(choice.text), (logprobs.tokens, choice.text)

    text, tokens, values, usage, reason = "", [], [], None, None
    stream = client.completions.create(
        model=model, prompt=PROMPT, logprobs=2, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    for chunk in stream:
        usage = chunk.usage or usage
        for piece in chunk.choices:
            text += piece.text
            reason = piece.finish_reason or reason
            if piece.logprobs:
                tokens += piece.logprobs.tokens
                values += piece.logprobs.token_logprobs
    assert (text, tokens, reason) == (choice.text, logprobs.tokens, choice.finish_reason)
    assert close(values, logprobs.token_logprobs)
    assert usage.completion_tokens == whole.usage.completion_tokens
    return text


def chat(client, model):
    """A chat in one piece, and the same as a stream."""
    asked = {"model": model, "messages": [{"role": "user", "content": PROMPT}]}
    whole = client.chat.completions.create(logprobs=True, top_logprobs=3, **asked, **GREEDY)
    choice = whole.choices[0]
    assert choice.message.role == "assistant"
    entries = choice.logprobs.content
    assert whole.usage.completion_tokens == len(entries)
    assert all(len(entry.top_logprobs) == 3 for entry in entries)
    assert all(entry.logprob <= entry.top_logprobs[0].logprob + 1e-6 for entry in entries)

    text, streamed, usage = "", [], None
    stream = client.chat.completions.create(
        logprobs=True, top_logprobs=3, stream=True, stream_options={"include_usage": True}, **asked, **GREEDY
    )
    for chunk in stream:
        usage = chunk.usage or usage
        for piece in chunk.choices:
            text += piece.delta.content or ""
            if piece.logprobs and piece.logprobs.content:
                streamed += piece.logprobs.content
    assert text == choice.message.content
    assert [entry.token for entry in streamed] == [entry.token for entry in entries]
    assert close([entry.logprob for entry in streamed], [entry.logprob for entry in entries])
    assert usage.total_tokens == whole.usage.total_tokens


def choices_and_seeds(client, model):
    """Several choices differ, and the same seed makes the same ones."""

    def sampled(seed):
        answer = client.completions.create(
            model=model, prompt="1", n=2, temperature=1.5, max_tokens=16, seed=seed, logprobs=0
        )
        assert [choice.index for choice in answer.choices] == [0, 1]
        return [(choice.text, choice.logprobs.token_logprobs) for choice in answer.choices]

    first = sampled(7)
    assert first == sampled(7)
    assert first[0] != first[1]
    assert first != sampled(8)


def stops(client, model, text):
    """A stop string is not in the text, and ends it."""
    assert len(text) > 1, text
    stop = text[1]
    answer = client.completions.create(model=model, prompt=PROMPT, stop=[stop], **GREEDY)
    assert answer.choices[0].text == text.split(stop)[0]
    assert answer.choices[0].finish_reason == "stop"


def refusals(client):
    """What is wrong is said in the client's own errors."""
    try:
        client.completions.create(model="no-such-model", prompt=PROMPT)
        raise AssertionError("a model that is not there")
    except openai.NotFoundError as error:
        assert error.body["message"], error
    try:
        client.completions.create(model=client.models.list().data[0].id, prompt=PROMPT, temperature=-1)
        raise AssertionError("a temperature below 0")
    except openai.BadRequestError as error:
        assert error.param == "temperature", error


def main():
    client = openai.OpenAI(base_url=sys.argv[1].rstrip("/") + "/v1", api_key="none", max_retries=0, timeout=60)
    model = client.models.list().data[0].id
    text = completion(client, model)
    chat(client, model)
    choices_and_seeds(client, model)
    stops(client, model, text)
    refusals(client)
    print("OpenAI's client is served")


if __name__ == "__main__":
    main()
