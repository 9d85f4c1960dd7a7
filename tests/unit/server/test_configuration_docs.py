"""The page of settings is what the configuration classes say."""

from kvpool_server.config import option_texts
from tests.unit.server.test_service_configs import SERVICES
from tools import generate_configuration_docs


def test_the_page_is_current() -> None:
    current = generate_configuration_docs.PAGE.read_text()
    wanted = generate_configuration_docs.page_text(current)
    assert current == wanted, "run python -m tools.generate_configuration_docs"


def test_the_page_is_about_every_service() -> None:
    assert [(config, prefix) for _, config, prefix in generate_configuration_docs.SERVICES] == SERVICES


def test_settings_are_shown_as_an_operator_writes_them_and_secrets_have_no_flag() -> None:
    texts = {text.variable: text for config, prefix in SERVICES for text in option_texts(config, env_prefix=prefix)}
    assert [variable for variable, text in texts.items() if not text.flag] == ["KVPOOL_INDEX_REDIS_URL"]
    assert texts["KVPOOL_PAGESTORE_ARENA_BYTES"].default == "1GiB"
    assert texts["KVPOOL_PAGESTORE_DATA_DIR"].default == "required"
    assert texts["KVPOOL_INDEX_TLS_CLIENT_AUTH"].values == "none|require"
