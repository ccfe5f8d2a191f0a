"""The ledger: append-only, exact round trip, and damage that is refused with the file kept."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from clipwise._json import checksum
from clipwise.accounting import FederatedRounds, GaussianSteps, Ledger, PrivateCalibration
from clipwise.accounting.events import decode, encode
from clipwise.errors import AccountingError, LedgerError
from clipwise.sampling import FixedSize, FullBatch, Poisson, Shuffled

EVENTS = (
    GaussianSteps(Poisson(60_000, 256), 1.1, 100),
    GaussianSteps(Poisson(60_000, 256), 1.1, 20, reason="training, large clipping norm"),
    GaussianSteps(Poisson(60_000, 256, 336), 0.1 + 0.2, 7),
    GaussianSteps(FullBatch(1_279), 35.0, 1),
    GaussianSteps(Shuffled(1_000, 10), 2.0, 5),
    GaussianSteps(FixedSize(1_000, 10), 2.0, 5),
    PrivateCalibration(3.0, 2, disjoint=True),
)


def test_equal_consecutive_events_merge() -> None:
    ledger = Ledger()
    for _ in range(5):
        ledger.record(GaussianSteps(Poisson(100, 10), 1.0))
    ledger.record(PrivateCalibration(2.0))
    ledger.record(GaussianSteps(Poisson(100, 10), 1.0, 3))
    assert [event.count for event in ledger.events] == [5, 1, 3]
    assert ledger.steps == 8


def test_only_events_are_recorded_and_a_failed_call_changes_nothing() -> None:
    ledger = Ledger(EVENTS)
    before = ledger.to_json()
    for wrong in ("a step", 1.1, None, ("gaussian", 1.0)):
        with pytest.raises(LedgerError):
            ledger.record(wrong)  # type: ignore[arg-type]
    for question in (lambda: ledger.epsilon(2.0), lambda: ledger.delta(-1.0), lambda: ledger.guarantee(1e-5, "no")):
        with pytest.raises(AccountingError):
            question()
    assert ledger.to_json() == before


def test_a_ledger_that_is_full_stays_readable() -> None:
    ledger = Ledger([GaussianSteps(FullBatch(10), 1.0, 10**12)])
    with pytest.raises(LedgerError, match="more than 1e"):
        ledger.record(GaussianSteps(FullBatch(10), 1.0))
    assert Ledger.from_json(ledger.to_json()).steps == 10**12


def test_events_cannot_be_changed_from_outside() -> None:
    ledger = Ledger(EVENTS)
    assert isinstance(ledger.events, tuple)
    with pytest.raises(AttributeError):
        ledger.events = ()  # type: ignore[misc]
    with pytest.raises(AttributeError):
        ledger.events[0].steps = 0  # type: ignore[misc, union-attr]
    assert not any(hasattr(ledger, name) for name in ("clear", "pop", "remove", "reset"))


@pytest.mark.parametrize("event", [*EVENTS, FederatedRounds(Poisson(50, 5), 1.0, 9)], ids=lambda e: type(e).__name__)
def test_events_round_trip(event: Any) -> None:
    assert decode(json.loads(json.dumps(encode(event)))) == event


def test_json_round_trip_is_exact() -> None:
    ledger = Ledger(EVENTS)
    again = Ledger.from_json(ledger.to_json())
    assert again == ledger and json.loads(again.to_json())["events"] == json.loads(ledger.to_json())["events"]
    assert Ledger.from_json(Ledger().to_json()).events == ()


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body["events"][0].update(steps=1),
        lambda body: body["events"][0].update(noise_multiplier=9.0),
        lambda body: body["events"][0]["sampling"].update(batch_size=1),
        lambda body: body["events"].pop(),
        lambda body: body["events"].reverse(),
        lambda body: body.update(checksum="sha256:0"),
        lambda body: body.pop("checksum"),
        lambda body: body.update(note="nothing to see"),
        lambda body: body.update(format="other"),
        lambda body: body.update(version=0),
        lambda body: body.update(events={}),
    ],
)
def test_an_edited_ledger_is_refused(change: Any) -> None:
    body = json.loads(Ledger(EVENTS).to_json())
    change(body)
    with pytest.raises(LedgerError):
        Ledger.from_json(json.dumps(body))


@pytest.mark.parametrize("character", ["0", "9", " ", '"', "a", "}"])
def test_no_single_character_can_be_changed_unseen(character: str) -> None:
    ledger = Ledger(EVENTS[:3])
    text = ledger.to_json()
    for place in range(len(text)):
        changed = text[:place] + character + text[place + 1 :]
        if changed != text:
            try:
                again = Ledger.from_json(changed)
            except LedgerError:
                continue
            assert again == ledger and json.loads(changed) == json.loads(text)  # white space


def test_a_newer_version_is_refused_even_with_a_goodchecksum() -> None:
    body = json.loads(Ledger(EVENTS).to_json())
    del body["checksum"]
    body["version"] = 3
    body["checksum"] = checksum(body)
    with pytest.raises(LedgerError, match="version 3"):
        Ledger.from_json(json.dumps(body))


@pytest.mark.parametrize(
    "record", [{"kind": "laplace"}, {"kind": "gaussian_steps"}, [], {"kind": "private_calibration"}]
)
def test_unknown_events_are_refused(record: Any) -> None:
    with pytest.raises(LedgerError):
        decode(record)


def test_an_event_that_makes_no_sense_is_refused_as_a_ledger_error() -> None:
    record = encode(EVENTS[0])
    record["steps"] = -1
    with pytest.raises(LedgerError, match="makes no sense"):
        decode(record)


def test_a_ledger_cut_after_any_byte_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    Ledger(EVENTS[:2]).save(path)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(LedgerError, match=r"ledger\.json"):
            Ledger.load(path)
        with pytest.raises(LedgerError):
            Ledger(EVENTS).save(path)
        assert path.read_bytes() == whole[:length]
    path.write_bytes(whole + whole[:1])
    with pytest.raises(LedgerError):
        Ledger.load(path)
    path.write_bytes(b"\xff\xfe" + whole)
    with pytest.raises(LedgerError):
        Ledger.load(path)


def test_saving_goes_on_but_never_forgets(tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    ledger = Ledger(EVENTS[:1])
    ledger.save(path)
    ledger.record(EVENTS[0])
    ledger.save(path)
    for event in EVENTS[1:]:
        ledger.record(event)
        ledger.save(path)
    assert Ledger.load(path) == ledger
    before = path.read_bytes()
    for shorter in (Ledger(), Ledger(EVENTS[:1]), Ledger(reversed(EVENTS))):
        with pytest.raises(LedgerError, match="forget"):
            shorter.save(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["ledger.json"]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ledger.json"
    ledger = Ledger(EVENTS[:1])
    ledger.save(path)
    before = path.read_bytes()
    ledger.record(EVENTS[1])

    def broken(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="disk full"):
        ledger.save(path)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["ledger.json"]


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match=r"none/ledger\.json cannot be written"):
        Ledger(EVENTS).save(tmp_path / "none" / "ledger.json")
    with pytest.raises(LedgerError, match="directory"):
        Ledger(EVENTS).save(tmp_path)
    assert os.listdir(tmp_path) == []


def test_a_half_written_file_of_a_crash_is_cleared_away(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("not ours")
    (tmp_path / ".ledger.json.part").symlink_to(elsewhere)
    Ledger(EVENTS).save(tmp_path / "ledger.json")
    assert Ledger.load(tmp_path / "ledger.json") == Ledger(EVENTS)
    assert sorted(os.listdir(tmp_path)) == ["elsewhere", "ledger.json"] and elsewhere.read_text() == "not ours"


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="cannot be read"):
        Ledger.load(tmp_path / "none.json")


def test_ledger_answers() -> None:
    ledger = Ledger([GaussianSteps(Poisson(60_000, 256), 1.1, 14_040)])
    assert ledger.guarantee(1e-5).printed == "2.380"
    assert ledger.delta(ledger.epsilon(1e-5)) == pytest.approx(1e-5, rel=1e-6)
    assert ledger.epsilon(1e-5, accountant="gdp") == pytest.approx(2.322, abs=1e-3)
    assert repr(ledger) == "Ledger(1 events, 14040 steps, zero_out)"


@pytest.mark.parametrize(
    "make",
    [
        lambda: GaussianSteps(Poisson(10, 1), -1.0),
        lambda: GaussianSteps(Poisson(10, 1), float("nan")),
        lambda: GaussianSteps(Poisson(10, 1), float("inf")),
        lambda: GaussianSteps(Poisson(10, 1), True),
        lambda: GaussianSteps(Poisson(10, 1), 1.0, 0),
        lambda: GaussianSteps(Poisson(10, 1), 1.0, 1.5),
        lambda: GaussianSteps(0.01, 1.0),
        lambda: FederatedRounds(0.01, 1.0),
        lambda: FederatedRounds(Poisson(10, 1), 1.0, -2),
        lambda: GaussianSteps(Poisson(10, 1), 10**400),
        lambda: GaussianSteps(Poisson(10, 1), 1.0, reason=None),  # type: ignore[arg-type]
        lambda: PrivateCalibration(1.0, reason={"why": "calibration"}),  # type: ignore[arg-type]
        lambda: PrivateCalibration(1.0, 0),
        lambda: PrivateCalibration(1.0, disjoint=1),
    ],
)
def test_nonsense_is_no_event(make: Any) -> None:
    with pytest.raises(AccountingError):
        make()


def test_of_two_processes_that_read_one_ledger_only_one_writes_it_again(tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    Ledger(EVENTS[:1]).save(path)
    one, other = Ledger.load(path), Ledger.load(path)
    for ledger in (one, other):
        ledger.record(EVENTS[0])  # as many steps on both: what one saved looks like a part of the other
    one.save(path)
    with pytest.raises(LedgerError, match="another process or run"):
        other.save(path)
    one.record(EVENTS[0])
    one.save(path)
    assert Ledger.load(path) == one


def test_steps_after_the_state_that_was_read_are_not_forgotten(tmp_path: Path) -> None:
    path, checkpoint = tmp_path / "ledger.json", tmp_path / "checkpoint.json"
    ledger = Ledger(EVENTS[:1])
    ledger.save(checkpoint)
    ledger.record(EVENTS[0])
    ledger.save(path)
    again = Ledger.load(checkpoint)
    again.save(checkpoint)
    for _ in range(2):
        again.record(EVENTS[0])
    with pytest.raises(LedgerError, match="forget"):
        again.save(path)
    assert Ledger.load(path) == ledger
