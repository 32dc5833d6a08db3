"""Bodies that are signed and compressed for transport."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairtrial.errors import BodyError, ConfigurationError
from fairtrial.mailbox import RedisMailbox
from fairtrial.mailbox.body import KEY_VARIABLE, queue_key, readable, seal, unseal
from tests.redis_server import RedisServer

KEY = b"a key that nobody guesses"
names = st.text(min_size=1, max_size=20)


@given(st.binary(max_size=300), st.none() | st.just(KEY), names, names)
def test_a_body_is_read_as_it_was_sent(body: bytes, key: bytes | None, mailbox: str, reply_to: str) -> None:
    body = b"{" + body
    sealed = seal(body, key, mailbox, reply_to)
    assert unseal(sealed, key, mailbox, reply_to) == readable(sealed) == body


@given(st.integers(0), st.integers(1, 255))
def test_a_changed_byte_is_noticed(place: int, change: int) -> None:
    sealed = bytearray(seal(b'{"score": 1.0}', KEY, "results", ""))
    sealed[place % len(sealed)] ^= change
    with pytest.raises(BodyError):
        unseal(bytes(sealed), KEY, "results", "")


@pytest.mark.parametrize(
    ("mailbox", "reply_to", "key"),
    [
        ("other", "replies", KEY),
        ("requests", "elsewhere", KEY),
        ("requests", "replies", b"another key entirely"),
        ("requests", "replies", None),
    ],
)
def test_a_body_is_refused_elsewhere_and_under_another_key(mailbox: str, reply_to: str, key: bytes | None) -> None:
    sealed = seal(b"{}", KEY, "requests", "replies")
    with pytest.raises(BodyError):
        unseal(sealed, key, mailbox, reply_to)


def test_a_body_without_a_signature_is_refused_where_there_is_a_key() -> None:
    with pytest.raises(BodyError, match=f"not signed: set {KEY_VARIABLE}"):
        unseal(b"{}", KEY, "requests", "")


def test_large_bodies_are_compressed() -> None:
    body = b'{"transcript": "' + b"the same words again. " * 100_000 + b'"}'
    sealed = seal(body, None, "requests", "")
    assert len(sealed) < len(body) / 50
    assert unseal(sealed, None, "requests", "") == body


def test_a_short_key_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "short")
    with pytest.raises(ConfigurationError, match="at least 16 characters"):
        queue_key()


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_forged_and_redirected_messages_on_redis_become_dead_letters(
    redis_server: RedisServer, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    forger: RedisMailbox[str] = RedisMailbox("results", str, redis_url)
    monkeypatch.setenv(KEY_VARIABLE, KEY.decode())
    async with RedisMailbox("results", str, redis_url) as mailbox, RedisMailbox("mine", str, redis_url) as mine, forger:
        await forger.send("forged")
        await mailbox.send("real", reply_to=mine)
        with redis_server.client() as client:
            (_id, fields), *_ = client.xrevrange(mailbox.keys.stream, count=1)
            client.xadd(mailbox.keys.stream, {**fields, b"r": b"attacker"})
        received = await mailbox.receive(max_messages=10, wait_time_seconds=5)
        assert [message.body for message in received] == ["real"]
        await received[0].reply("thanks")
        await received[0].acknowledge()
        assert [message.body for message in await mine.receive(wait_time_seconds=5)] == ["thanks"]
        letters = await mailbox.dead_letters.page()
        assert [letter.text for letter in letters] == ['"forged"', '"real"']
        assert "not signed" in letters[0].reason
        assert "signature is wrong" in letters[1].reason


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_body_of_several_megabytes_passes_a_mailbox_of_one(redis_url: str) -> None:
    text = "the same words again. " * 200_000
    async with RedisMailbox("large", str, redis_url) as mailbox:
        await mailbox.send(text)
        (message,) = await mailbox.receive(wait_time_seconds=5)
        assert message.body == text
        await message.acknowledge()
