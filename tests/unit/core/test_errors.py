import pytest

from kvpool.core.errors import ERRORS_BY_REASON, InvalidRequest, KeyspaceMismatch, KvPoolError, PageCorrupt


def all_errors() -> list[type[KvPoolError]]:
    found, rest = [], [KvPoolError]
    while rest:
        rest += (subclasses := rest.pop().__subclasses__())
        found += [error for error in subclasses if error.__module__.startswith("kvpool.")]
    return found


def test_every_error_has_a_reason_of_its_own() -> None:
    assert sorted(error.reason for error in all_errors()) == sorted(ERRORS_BY_REASON)
    assert "INTERNAL" not in ERRORS_BY_REASON


@pytest.mark.parametrize("reason", ERRORS_BY_REASON)
def test_an_error_survives_the_way_to_another_process(reason: str) -> None:
    error = ERRORS_BY_REASON[reason]("page 7 did not do")
    again = KvPoolError.from_message(reason, str(error))
    assert type(again) is type(error) and str(again) == str(error) == error.message
    assert str(error).startswith("page 7 did not do")
    assert str(error).count(error.advice) == 1 or not error.advice


def test_an_unknown_reason_is_kept_in_the_message() -> None:
    error = KvPoolError.from_message("FROM_THE_FUTURE", "it broke")
    assert type(error) is KvPoolError and str(error) == "FROM_THE_FUTURE: it broke"


def test_messages_say_what_to_do() -> None:
    assert str(PageCorrupt("page x fails its digest")) == (
        "page x fails its digest; drop the page and recompute the prefix"
    )
    assert InvalidRequest("bad", item_index=3).item_index == 3
    assert InvalidRequest("bad").item_index is None
    assert KeyspaceMismatch("differs", field="dtype").field == "dtype"
