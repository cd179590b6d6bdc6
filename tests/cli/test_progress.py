"""What long work tells on standard error: lines in a pipe, with what is left."""

import time

from mlx_h2o import _progress
from mlx_h2o._progress import ProgressReport, duration, progress_bar


def test_a_pipe_gets_lines_with_counts_and_the_time_left(monkeypatch, capsys):
    """Also while nothing is told; the first comes soon, with what is expected."""
    monkeypatch.setattr(_progress, "FIRST", 0.05)
    monkeypatch.setattr(_progress, "EVERY", 0.05)
    with progress_bar("measuring", "tokens") as bar:
        time.sleep(0.1)  # loading
        bar(0, 4000)
        time.sleep(0.05)
        bar(1000, 4000)
        bar.about("a cache")
        time.sleep(0.15)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("measuring, ")
    assert "left" not in lines[0]
    counted = [line for line in lines if "1,000 of 4,000 tokens (25%)" in line]
    assert counted
    assert counted[-1].startswith("measuring: a cache, ")
    assert "about " in counted[-1]
    assert counted[-1].endswith(" left")
    assert lines[-1].startswith("measuring: ended after ")


def test_short_work_says_nothing(capsys):
    with progress_bar("reading", "tokens") as bar:
        bar(1, 1)
    assert capsys.readouterr().err == ""


def test_the_time_left_counts_from_where_counting_began(monkeypatch):
    """Not from before the model was loaded, nor at the speed of what was done another day."""
    now = [0.0]
    monkeypatch.setattr(_progress.time, "monotonic", lambda: now[0])
    report = ProgressReport("calibrating")
    assert report.seconds_left() is None
    now[0] = 100.0
    report(500, 1000)
    assert report.seconds_left() is None
    now[0] = 110.0
    report(600, 1000)
    assert report.seconds_left() == 40.0


def test_durations_are_in_words():
    assert [duration(s) for s in (4.4, 75, 3700)] == ["4 s", "1 min 15 s", "1 h 1 min"]
