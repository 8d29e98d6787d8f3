"""The journal of a long bench: what is done is kept, for the same code, and a run's time has an end."""

import pytest

from bench.simcases.journal import Journal, OutOfTime, Steps, digest


def test_a_run_goes_on_where_it_stopped(tmp_path):
    file = tmp_path / "sim.journal"
    first = Journal(file, "code", limit=0)
    with pytest.raises(OutOfTime):
        first.done("one", "found")
    again = Journal(file, "code")
    assert again.get("one") == "found" and again.get("two") is None
    again.done("two", "wrong")
    again.save()
    assert Journal(file, "code").steps == {"one": "found", "two": "wrong"}
    assert Journal(file, "other code").steps == {}
    again.close()
    assert not file.exists()


def test_without_a_file_nothing_is_kept():
    journal = Journal(None, "code")
    journal.done("one", 1)
    journal.save()
    journal.close()
    assert journal.get("one") == 1


def test_progress_is_lines_where_there_is_no_terminal(capsys):
    with Steps("mutations") as steps:
        steps.expect(2, "softmax")
        steps.step("found")
        steps.step("wrong")
    assert "mutations: softmax: 2 of 2 wrong" in capsys.readouterr().err


def test_digest_follows_contents(tmp_path):
    a = tmp_path / "a.py"
    a.write_text("1")
    before = digest([a])
    a.write_text("2")
    assert digest([a]) != before
