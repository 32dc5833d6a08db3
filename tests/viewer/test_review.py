"""Review by people: the sample, what reviewers see, who may do what, and what comes out."""

from __future__ import annotations

import csv
import html
import io
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlencode

import numpy as np
import pytest

from fairtrial import ConfigurationError, EvalReport, Label, TrialKey, calibrate, open_store
from fairtrial.reports.figures.labels import draw_trials, keyed_hash
from fairtrial.reports.figures.trial_columns import TrialColumns
from fairtrial.store import RunStore
from fairtrial.store.notes import ReviewNote, write_notes
from fairtrial.viewer.access import Access, check_reviewers, kept_secrets
from fairtrial.viewer.review import (
    RESERVED_SECONDS,
    Reservations,
    ReviewMember,
    ReviewState,
    answer_labels,
    make_members,
    new_review,
    next_member,
    review_code,
)
from tests.viewer.conftest import Answer, Viewed, add_support_runs, open_session, record, start_server

pytestmark = pytest.mark.proves("R115")
RUN = "support@2"
REVIEW = ReviewNote("helpful", "Does it help?", "", ("baseline", "careful"), "pass_fail", "00112233445566aa", 10)


def members_of(review: ReviewNote, size: int = 6) -> list[ReviewMember]:
    return make_members(record("r"), review, range(size), [f"q{at // 2:02}" for at in range(size)])


def say(state: ReviewState, member: ReviewMember, who: str, value: object, name: str = "helpful") -> None:
    state._add(member, Label(member.key, name, value, who, at=1.0))  # type: ignore[arg-type]


class TestSample:
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[RunStore]:
        made = open_store(tmp_path / "runs.db")
        add_support_runs(made)
        yield made
        made.close()

    def test_a_larger_sample_contains_the_smaller_one_and_scored_trials_alone(self, store: RunStore) -> None:
        run = store.get_run("support-run-2")
        columns = TrialColumns.open(store, run)
        small, large = (draw_trials(columns, replace(REVIEW, size=size)) for size in (10, 25))
        assert len(small.ordinals) == 20
        assert set(small.ordinals) < set(large.ordinals)
        assert small.judged == 72
        assert all(run.split(ordinal)[0] % 10 != 9 for ordinal in large.ordinals)
        assert [run.split(ordinal)[1] for ordinal in small.ordinals] == [0] * 10 + [1] * 10
        again = draw_trials(TrialColumns.open(store, run), replace(REVIEW, size=10))
        assert again == small
        assert draw_trials(columns, replace(REVIEW, seed="01")).ordinals != small.ordinals

    def test_every_trial_is_drawn_equally_often_and_independently(self) -> None:
        trials, drawn, seeds = 40, 10, 4_000
        counts, pairs = np.zeros(trials), np.zeros(trials)
        for seed in range(seeds):
            chosen = np.argsort(keyed_hash(seed * 0x1234567, np.arange(trials)))[:drawn]
            counts[chosen] += 1
            pairs[np.intersect1d(chosen, chosen[chosen > 0] - 1)] += 1
        expected = seeds * drawn / trials
        chi_square = float(((counts - expected) ** 2 / (expected * (1 - drawn / trials))).sum())
        assert chi_square < 80  # 40 trials: beyond 0.9999 of the distribution.
        both = seeds * drawn * (drawn - 1) / (trials * (trials - 1))
        assert np.abs(pairs[:-1] - both).max() < 6 * np.sqrt(both)


class TestState:
    def test_the_order_is_random_and_differs_between_reviewers(self) -> None:
        state = ReviewState(REVIEW, members_of(REVIEW, 40))
        orders = [[member.ordinal for member in state.order(who)] for who in ("ann", "ann", "ben")]
        assert orders[0] == orders[1] != orders[2]
        assert sorted(orders[2]) == list(range(40)) != orders[0]

    def test_a_tie_is_open_to_a_third_reviewer_and_then_settled(self) -> None:
        review = replace(REVIEW, votes=2)
        state = ReviewState(review, members_of(review, 1))
        [member] = state.members
        say(state, member, "ann", True)
        assert state.is_open(member, "ben")
        say(state, member, "ben", False)
        assert (state.is_open(member, "ann"), state.is_open(member, "eve")) == (False, True)
        assert (state.tied, state.disputed, state.majority(member)) == ([member], [member], None)
        say(state, member, "eve", False)
        assert (state.tied, state.majority(member), state.is_open(member, "dan")) == ([], False, False)
        assert state.is_complete

    def test_the_last_word_counts_and_a_skip_takes_an_answer_back(self) -> None:
        state = ReviewState(REVIEW, members_of(REVIEW, 1))
        [member] = state.members
        for label in answer_labels(state, member, "ann", say="pass", comment=" hm "):
            state._add(member, label)
        assert (state.answers, state.comments) == ({0: {"ann": True}}, {0: {"ann": "hm"}})
        labels = answer_labels(state, member, "ann", skip="cannot tell", comment="hm")
        assert [(label.name, label.value) for label in labels] == [("helpful", None), ("~skip:helpful", "cannot tell")]
        for label in labels:
            state._add(member, label)
        assert (state.answers, state.skipped, state.is_complete) == ({0: {}}, [member], True)
        labels = answer_labels(state, member, "ann", say="fail", comment="", looked=True)
        assert [(label.name, label.value) for label in labels] == [
            ("~comment:helpful", None), ("~looked:helpful", "expected"), ("helpful", False), ("~skip:helpful", None),
        ]  # fmt: skip
        for label in labels:
            state._add(member, label)
        assert (state.answers, state.skipped, state.comments[0]) == ({0: {"ann": False}}, [], {})

    @pytest.mark.parametrize(("word", "skip"), [("excellent", ""), ("", ""), ("", "bored"), ("True", "")])
    def test_what_is_not_on_the_scale_is_refused(self, word: str, skip: str) -> None:
        state = ReviewState(REVIEW, members_of(REVIEW, 1))
        with pytest.raises(ConfigurationError, match="must be one of pass, fail"):
            answer_labels(state, state.members[0], "ann", say=word, skip=skip)

    def test_a_trial_on_one_screen_is_not_shown_on_another_until_its_time_is_over(self) -> None:
        state, desk = ReviewState(REVIEW, members_of(REVIEW, 1)), Reservations()
        [member] = state.members
        assert next_member(state, "c", "ann", desk, 0.0) is member
        assert next_member(state, "c", "ben", desk, 1.0) is None
        assert next_member(state, "c", "ann", desk, 2.0) is member
        assert next_member(state, "c", "ben", desk, 3.0 + RESERVED_SECONDS) is member

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"name": ""}, "1 to 60 characters"), ({"name": "~picked:x"}, "not begin with '~'"),
            ({"question": " "}, "must have a question"), ({"experiments": ["nothing"]}, "no experiment 'nothing'"),
            ({"scale": "stars"}, "scale must be one of"), ({"size": 0}, "1 to 10,000 trials"),
            ({"votes": 21}, "1 to 20 reviewers"), ({"name": "taken"}, "already has a review 'taken'"),
        ],
    )  # fmt: skip
    def test_a_review_that_makes_no_sense_is_refused(self, changes: dict[str, object], words: str) -> None:
        run = replace(record("r"), notes=write_notes(reviews=(replace(REVIEW, name="taken"),)))
        given: dict[str, object] = {"name": "helpful", "question": "Is it?"} | changes
        with pytest.raises(ConfigurationError, match=words):
            new_review(run, **given)  # type: ignore[arg-type]


class TestAccess:
    def test_a_reviewer_keeps_address_and_session_over_a_restart(self, tmp_path: Path) -> None:
        prefix, token, tokens = kept_secrets(tmp_path, ["ann"])
        first = Access.create(port=1, prefix=prefix, user="me", reviewers=tokens, token=token)
        visitor, session = first.sign_in(tokens["ann"]) or (None, "")
        assert visitor is not None
        assert (visitor.name, visitor.review_only) == ("ann", True)
        again = kept_secrets(tmp_path, ["ann", "ben"])
        assert (again.prefix, again.reviewers["ann"]) == (prefix, tokens["ann"])
        second = Access.create(port=1, prefix=prefix, user="me", reviewers=again.reviewers, token=again.token)
        assert second.visitor(session) == visitor
        others = kept_secrets(tmp_path, ["ben"])
        alone = Access.create(port=1, prefix=prefix, user="me", reviewers=others.reviewers, token=others.token)
        assert alone.visitor(session) is None
        renewed = Access.create(port=1, prefix=prefix, user="me", reviewers=again.reviewers, token="another" * 6)
        assert renewed.visitor(session) is None
        assert kept_secrets(tmp_path, ["ann"]).reviewers == tokens

    @pytest.mark.parametrize("names", [("ann", "ann"), ("me",), ("x" * 61,), ("a\nb",)])
    def test_names_that_cannot_be_told_apart_are_refused(self, names: tuple[str, ...]) -> None:
        with pytest.raises(ConfigurationError, match="name of a reviewer"):
            check_reviewers(names, "me")
        assert check_reviewers((" ann ", "", "ben"), "me") == ("ann", "ben")


@dataclass
class Desk:
    """A server with one review, its owner and two reviewers."""

    owner: Viewed
    people: dict[str, Viewed]
    name: str = ""
    code: str = ""

    def post(self, who: Viewed, path: str, fields: list[tuple[str, str]], **headers: str) -> Answer:
        origin = f"http://127.0.0.1:{who.server.port}"
        given = {"Origin": origin, "Content_Type": "application/x-www-form-urlencoded", **headers}
        return who.get(path, method="POST", body=urlencode(fields), **given)

    def secret(self, who: Viewed) -> tuple[str, str]:
        return "form_secret", Access.form_secret(who.cookie.partition("=")[2])

    def member(self, who: str) -> str:
        page = self.people[who].get(f"review/{self.code}").text
        [code] = re.findall(r'name="id" value="([0-9a-f]{16})"', page)
        return str(code)

    def answer(self, who: str, *fields: tuple[str, str]) -> Answer:
        person = self.people[who]
        return self.post(person, f"review/{self.code}", [self.secret(person), ("id", self.member(who)), *fields])


NEW = [
    ("question", "Does it help?"), ("guidelines", "Be **strict**."), ("scale", "ratings"),
    ("size", "4"), ("votes", "2"), ("experiment", "baseline"), ("shows", "m.level"),
]  # fmt: skip


@pytest.fixture(scope="module")
def office(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    path = tmp_path_factory.mktemp("review") / "runs.db"
    store = open_store(path)
    add_support_runs(store)
    server, thread = start_server(path, reviewers=("ann", "ben"), user="me")
    owner = Viewed(server, store, open_session(server))
    people = {name: Viewed(server, store, open_session(server, name)) for name in ("ann", "ben")}
    yield Desk(owner, people)
    server.stop()
    thread.join(60)
    store.close()
    assert not thread.is_alive()


@pytest.fixture
def desk(office: Desk) -> Desk:
    """A review of its own for each test, all on one server."""
    name = f"helpful{len(office.owner.store.get_run('support-run-2').noted.reviews)}"
    fields = [*NEW, ("name", name)]
    answer = office.post(office.owner, f"{RUN}/review", [office.secret(office.owner), *fields])
    assert (answer.status, answer.headers["location"]) == (303, f"../support@2/review/{name}")
    [code] = set(re.findall(r'href="\.\./\.\./review/([0-9a-f]{16})"', office.owner.get(f"{RUN}/review/{name}").text))
    return Desk(office.owner, office.people, name, str(code))


def test_a_reviewer_sees_reviews_and_nothing_else(desk: Desk) -> None:
    ann = desk.people["ann"]
    assert ann.get("login?token=x").status == 401
    assert desk.name in ann.get("review").text
    for path in (
        "",
        RUN,
        f"{RUN}/trials",
        f"{RUN}/t/baseline/q01",
        f"{RUN}/review",
        f"{RUN}/review/{desk.name}",
        "history",
    ):
        assert ann.get(path).status == 403, path
    for path in (f"{RUN}/review", f"{RUN}/review/{desk.name}", f"{RUN}/picked"):
        assert desk.post(ann, path, [desk.secret(ann), *NEW]).status == 403, path


def test_a_form_of_another_session_or_without_one_changes_nothing(desk: Desk) -> None:
    ann, ben, path = desk.people["ann"], desk.people["ben"], f"review/{desk.code}"
    fields = [("id", desk.member("ann")), ("say", "good")]
    before = list(desk.owner.store.labels("support-run-2"))
    reviews = desk.owner.store.get_run("support-run-2").noted.reviews
    assert desk.post(ann, path, fields).status == 403
    assert desk.post(ann, path, [desk.secret(ben), *fields]).status == 403
    assert desk.post(ann, path, [desk.secret(ann), *fields], Origin="http://evil.example").status == 403
    assert desk.post(ann, path, [desk.secret(ann), *fields], Sec_Fetch_Site="same-site").status == 403
    assert desk.post(ann, path, [desk.secret(ann), *fields], Content_Type="text/plain").status == 403
    assert desk.post(desk.owner, f"{RUN}/review", NEW).status == 403
    assert desk.post(desk.owner, f"{RUN}/review/{desk.name}", [("more", "5")]).status == 403
    assert desk.post(desk.owner, f"{RUN}/picked", [("o", "1"), ("name", desk.name), ("say", "good")]).status == 403
    assert list(desk.owner.store.labels("support-run-2")) == before
    assert desk.owner.store.get_run("support-run-2").noted.reviews == reviews


@pytest.mark.parametrize("more", ["", "&transcript=1", "&expected=1&transcript=1&form=markdown"])
def test_nothing_of_the_judge_the_run_or_others_is_sent_to_a_reviewer(desk: Desk, more: str) -> None:
    ann = desk.people["ann"]
    page = ann.get(f"review/{desk.code}?id={desk.member('ann')}{more}").text
    body = html.unescape(page.replace("says baseline", ""))  # The answer itself says it.
    for hidden in (
        "judge-model", "as expected", "not what was asked", "a fine answer", "judged by", "support", "baseline",
        "refund", "delivery", "q0", "q1", "q2", "q3", "passed", "failed", "0.250", "runs.db", "me: ", "ben",
        "You help customers",
    ):  # fmt: skip
        assert hidden not in body, hidden
    assert "Where is order" in body
    assert "level" in body
    assert ("<dt>expected</dt>" in body) == ("expected" in more)
    assert ("find_order" in body) == ("transcript" in more)


def test_answers_become_labels_that_calibrate_reads(desk: Desk) -> None:
    store = desk.owner.store
    seen = []
    for number in range(4):
        seen.append(desk.member("ann"))
        answer = desk.answer("ann", ("say", "good" if number else "poor"), ("comment", f"note {number}"))
        assert (answer.status, answer.headers["location"]) == (303, f"../review/{desk.code}")
    assert len(set(seen)) == 4
    assert "Nothing is left for you" in desk.people["ann"].get(f"review/{desk.code}").text
    facts = desk.owner.json(f"{RUN}/review/{desk.name}")
    assert (facts["trials"], facts["judged"], facts["answered"], facts["complete"]) == (4, 36, 4, False)
    waiting = desk.owner.get(f"{RUN}/calibration?name={desk.name}").text
    assert "4 of 4 trials answered so far" in waiting
    assert "People would" not in waiting
    for number in range(3):
        desk.answer("ben", ("say", "good" if number else "poor"))
    assert desk.answer("ben", ("skip", "cannot tell")).status == 303
    report: EvalReport = EvalReport(store, store.get_run("support-run-2"))
    found = calibrate(report["baseline"], name=desk.name)
    assert found.annotators == ("ann", "ben")
    assert found.panel is not None
    assert found.panel.trials == 3
    assert desk.owner.json(f"{RUN}/calibration?name={desk.name}") == json.loads(json.dumps(found.to_json()))
    names = {label.name for label in store.labels("support-run-2") if desk.name in label.name}
    assert names == {desk.name, f"~comment:{desk.name}", f"~skip:{desk.name}"}
    assert {label.value for label in store.labels("support-run-2", name=desk.name)} == {"good", "poor"}
    page = html.unescape(desk.owner.get(f"{RUN}/review/{desk.name}").text)
    assert "note 2" in page
    assert "Krippendorff" in page
    rows = list(csv.DictReader(io.StringIO(desk.owner.get(f"{RUN}/review/{desk.name}/labels.csv").text)))
    assert len(rows) == 7
    assert {row["label"] for row in rows} == {"good", "poor"}


def test_a_sample_grows_without_losing_an_answer(desk: Desk) -> None:
    assert desk.answer("ann", ("say", "fair")).status == 303
    before = desk.owner.json(f"{RUN}/review/{desk.name}")
    answer = desk.post(desk.owner, f"{RUN}/review/{desk.name}", [desk.secret(desk.owner), ("more", "3")])
    assert answer.status == 303
    after = desk.owner.json(f"{RUN}/review/{desk.name}")
    assert (after["trials"], after["annotators"]) == (before["trials"] + 3, before["annotators"])


def test_a_picked_label_is_kept_apart_and_changes_no_estimate(desk: Desk) -> None:
    store = desk.owner.store
    report: EvalReport = EvalReport(store, store.get_run("support-run-2"))
    desk.answer("ann", ("say", "good"))
    before = calibrate(report["baseline"], name=desk.name).to_json()
    fields = [desk.secret(desk.owner), ("o", "0"), ("name", desk.name), ("say", "wrong")]
    answer = desk.post(desk.owner, f"{RUN}/picked", fields)
    assert answer.status == 303
    assert [label.value for label in store.labels("support-run-2", name=f"~picked:{desk.name}")] == ["wrong"]
    assert calibrate(report["baseline"], name=desk.name).to_json() == before
    page = desk.owner.get(f"{RUN}/t/baseline/q00").text
    assert "picked: in no estimate" in page
    assert "me: wrong" in page
    facts = desk.owner.json(f"{RUN}/review/{desk.name}")
    assert "me" not in facts["annotators"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": "~x"}, "not begin with"),
        ({"size": "many"}, "size must be a whole number"),
        ({"name": ""}, "already has a review"),
        ({"name": "imported"}, "already has labels named 'imported'"),
    ],
)
def test_a_review_that_cannot_be_made_is_explained_and_what_was_typed_is_kept(
    desk: Desk, changes: dict[str, str], words: str
) -> None:
    store = desk.owner.store
    store.label(Label(TrialKey("support-run-2", "baseline", "q01"), "imported", True, "somebody"))
    fields = dict(NEW) | {"name": "other"} | {key: value or desk.name for key, value in changes.items()}
    answer = desk.post(desk.owner, f"{RUN}/review", [desk.secret(desk.owner), *fields.items()])
    assert answer.status == 422
    assert words in html.unescape(answer.text)
    assert "Be **strict**." in answer.text


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("review/0000000000000000", 404), (f"{RUN}/review/nothing", 404), ("support@1/calibration", 404),
        (f"{RUN}/calibration?name={desk.name}&e=careful", 404), (f"{RUN}/review/helpful/labels.xlsx", 404),
    ],
)  # fmt: skip
def test_what_is_missing_is_said(desk: Desk, path: str, status: int) -> None:
    assert desk.owner.get(path.replace("NAME", desk.name)).status == status
    assert desk.people["ann"].get(f"review/{desk.code}?id=zz").status == 404


def test_a_store_that_is_read_only_has_no_route_that_changes_anything(tmp_path: Path) -> None:
    store = open_store(tmp_path / "runs.db")
    add_support_runs(store)
    store.update_run("support-run-2", notes=write_notes(reviews=(REVIEW,)))
    server, thread = start_server(tmp_path / "runs.db", read_only=True, user="me")
    owner = Viewed(server, store, open_session(server))
    desk = Desk(owner, {})
    for path in (f"{RUN}/review", f"{RUN}/review/helpful", f"{RUN}/picked"):
        assert desk.post(owner, path, [desk.secret(owner), *NEW]).status in (404, 405), path
    assert "for reading only" in owner.get(f"{RUN}/review").text
    code = re.findall(r"review/([0-9a-f]{16})", owner.get(f"{RUN}/review/helpful").text)[0]
    assert "answers cannot be stored" in owner.get(f"review/{code}").text
    server.stop()
    thread.join(60)
    store.close()
    assert not thread.is_alive()


def test_an_attachment_of_a_drawn_trial_is_sent_and_no_other(tmp_path: Path) -> None:
    from fairtrial import Attachment, Sample, Score
    from fairtrial.trials.result import EvalResult

    store = open_store(tmp_path / "runs.db")
    run = store.create_run(record("r", "pictures", 2, experiments=("baseline",)))
    files = [Attachment(store.put_blob(data), "text/plain", len(data)) for data in (b"one", b"two")]
    results = [
        EvalResult(
            key=TrialKey("r", "baseline", f"q{at}"),
            ordinal=at,
            outcome="scored",
            score=Score(1.0),
            output="x",
            execution=at + 1,
        )
        for at in (0, 1)
    ]
    store.commit(run.run_id, results, {at: Sample(f"q{at}", {"file": files[at]}) for at in (0, 1)})
    review = replace(REVIEW, experiments=("baseline",), size=1)
    store.update_run(run.run_id, status="finished", finished_at=5.0, notes=write_notes(reviews=(review,)))
    server, thread = start_server(tmp_path / "runs.db", reviewers=("ann",), user="me")
    ann = Viewed(server, store, open_session(server, "ann"))
    code = review_code("r", review)
    page = ann.get(f"review/{code}").text
    [address] = re.findall(r'href="\.\./(review/[0-9a-f]{16}/blob/[0-9a-f]{64}\?id=[0-9a-f]{16})"', page)
    answer = ann.get(address)
    assert (answer.status, answer.text in ("one", "two")) == (200, True)
    [shown, other] = sorted((file.sha256 for file in files), key=lambda sha256: sha256 not in address)
    assert ann.get(address.replace(shown, other)).status == 404
    assert ann.get(address.partition("?")[0]).status == 404
    server.stop()
    thread.join(60)
    assert not thread.is_alive()
    store.close()
