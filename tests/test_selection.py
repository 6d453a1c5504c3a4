"""What `make test-fast` and `make test` leave out is there: a renamed test would come back."""

from tests.conftest import LONG, SLOW
from tests.durations import is_there


def test_what_is_named_is_there() -> None:
    names = (*LONG, *SLOW)
    assert len(names) > 50
    gone = [name for name in names if not is_there(name)]
    assert gone == [], "python -m tests.durations writes those of durations.csv anew"
