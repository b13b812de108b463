"""The Hugging Face hub: asked only where it can answer."""

from __future__ import annotations

from normlab.utils import hub


def test_the_hub_is_asked_only_where_there_is_a_network(monkeypatch):
    def refuse(*args, **options):
        raise OSError("no network")

    monkeypatch.setattr(hub.socket, "create_connection", refuse)
    monkeypatch.setattr(hub.urllib.request, "getproxies", dict)
    assert not hub.is_reachable()
    monkeypatch.setattr(hub.urllib.request, "getproxies", lambda: {"https": "http://proxy"})
    assert hub.is_reachable()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert not hub.is_reachable()


def test_what_is_no_id_is_not_on_this_machine():
    for name in ("nobody/nothing-7b", "a/b/c", "-", "a b"):
        assert hub.cached_file(name, "tokenizer.json") is None


def test_a_downloaded_file_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    kept = tmp_path / "models--some--one" / "snapshots" / "1a2b" / "tokenizer.json"
    kept.parent.mkdir(parents=True)
    kept.write_text("{}")
    reference = tmp_path / "models--some--one" / "refs" / "main"
    reference.parent.mkdir()
    reference.write_text("1a2b")
    assert hub.cached_file("some/one", "tokenizer.json") == kept
