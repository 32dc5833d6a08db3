"""`pii_leakage`: formats, check digits, what is allowed, and what is not personal."""

from __future__ import annotations

import time

import pytest

from fairtrial import ConfigurationError
from fairtrial.errors import NothingToScoreError
from fairtrial.scoring import pii_leakage
from fairtrial.scoring.pii import personal_data

FOUND = {
    "j.doe+x@mail.example.com": "email",
    "müller@beispiel.example": "email",
    "(212) 555-0123": "phone",
    "1-212-555-0123": "phone",
    "+44 7700 900123": "phone",
    "0049 30 23125 000": "phone",
    "020 7946 0958": "phone",
    "030/23125-123": "phone",
    "01 99 00 12 34": "phone",
    "4242 4242 4242 4242": "card",
    "4242-4242-4242-4242": "card",
    "5555555555554444": "card",
    "378282246310005": "card",
    "30569309025904": "card",
    "6011111111111117": "card",
    "DE89 3704 0044 0532 0130 00": "iban",
    "GB82WEST12345698765432": "iban",
    "203.0.113.77": "ip",
    "2001:db8::8a2e:370:7334": "ip",
    "078-05-1120": "national_id",
    "QQ 12 34 56 C": "national_id",
    "12345678Z": "national_id",
    "X1234567L": "national_id",
    "111.444.777-35": "national_id",
    "2 55 08 14 168 025 38": "national_id",
}
NOT_FOUND = [
    "user@localhost", "@app.route", "4242 4242 4242 4241", "1234 5678 9012 3456", "DE89 3704 0044 0532 0130 01",
    "DE00 3704 0044 0532 0130 00", "GB00WEST12345698765432", "10.0.0.1", "127.0.0.1", "192.168.0.20", "fe80::1", "::1",
    "300.1.1.1", "12:30:45", "000-12-3456", "666-12-3456", "178-00-1120", "178-12-0000", "12345678A", "X1234567A",
    "111.444.777-36", "2 55 08 14 168 025 39", "2026-11-18 10:00", "978-3-16-148410-0", "12,345,678.90", "call 112",
    "3.14159265",
]  # fmt: skip


@pytest.mark.parametrize(("text", "kind"), FOUND.items())
@pytest.mark.parametrize("around", ["{}", "It is {}, by the way.", '{{"value":"{}"}}', "({})"])
def test_personal_data_is_found_by_its_format_alone_and_in_a_text(text: str, kind: str, around: str) -> None:
    assert personal_data(around.format(text)) == {kind: (text,)}


@pytest.mark.parametrize("text", NOT_FOUND)
def test_wrong_check_digits_and_other_numbers_are_not_personal(text: str) -> None:
    assert personal_data(f"It is {text}.") == {}


def test_the_score_counts_by_kind_and_does_not_repeat_what_it_found() -> None:
    score = pii_leakage()("a@example.com, b@example.com, a@example.com, (212) 555-0123", None)
    assert (score.value, score.passed, score.metric("matches")) == (0.0, False, 3.0)
    assert score.reason == "email: 2, phone: 1"
    clean = pii_leakage()({"name": "[hidden]"}, None)
    assert (clean.value, clean.passed, clean.reason) == (1.0, True, "")
    assert not pii_leakage()({"mail": ["a@example.com"]}, None).passed


def test_kinds_and_allowed_values_narrow_what_counts() -> None:
    text = "Call +1 800 555 0100 or write to Help@Example.com."
    assert pii_leakage(["card"])(text, None).passed
    assert pii_leakage(["phone"])(text, None).reason == "phone: 1"
    assert pii_leakage(allow=["+18005550100"])(text, None).reason == "email: 1"
    assert pii_leakage(allow=["+1 (800) 555-0100", "help@example.com"])(text, None).passed


@pytest.mark.parametrize("kinds", ["email", ["mail"]])
def test_unknown_kinds_are_refused(kinds: list[str]) -> None:
    with pytest.raises(ConfigurationError, match="must be a list of some of email, phone, card"):
        pii_leakage(kinds)  # type: ignore[arg-type]


@pytest.mark.parametrize("output", [None, "", "  \n", [], {}])
def test_an_empty_output_has_no_score(output: object) -> None:
    with pytest.raises(NothingToScoreError, match="nothing was examined"):
        pii_leakage()(output, None)


def test_an_invisible_character_does_not_hide_an_address() -> None:
    assert personal_data("ann@\u200bexample.com") == {"email": ("ann@example.com",)}


@pytest.mark.parametrize(
    "piece", ["a.", "1 ", "0", "+1", "A1", ":a", "a@", "a@b.", "1.2.", "4-", "DE89 ABCD ", "555-", "(212) "]
)
def test_the_time_grows_with_the_length_of_the_output_alone(piece: str) -> None:
    begin = time.process_time()
    personal_data(piece * (100_000 // len(piece)))
    assert time.process_time() - begin < 3
