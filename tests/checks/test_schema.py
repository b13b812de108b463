"""The JSON Schema of a check: valid itself, met by what is written, and not met by what is not a check."""

from __future__ import annotations

import json
from typing import Any

import pytest

from normlab.checks.result import Check
from normlab.checks.schema import schema
from normlab.checks.view.side_by_side import Against
from tests.checks import finished
from tests.checks.test_result import full

jsonschema = pytest.importorskip("jsonschema")


def errors(record: Any, kind: type = Check) -> list[str]:
    validator = jsonschema.Draft202012Validator(schema(kind))
    return [error.json_path for error in validator.iter_errors(record)]


@pytest.mark.parametrize("kind", [Check, Against])
def test_the_schema_is_one(kind: type) -> None:
    jsonschema.Draft202012Validator.check_schema(schema(kind))
    assert schema(kind)["$schema"] == "https://json-schema.org/draft/2020-12/schema"


@pytest.mark.parametrize(
    "check", [full(), finished.check(), finished.exploding(), finished.collapsing()], ids=lambda c: c.target.name
)
def test_what_is_written_meets_it(check: Check) -> None:
    assert errors(json.loads(check.to_json())) == []


def test_two_checks_meet_theirs() -> None:
    pair = Against(full(), finished.collapsing())
    assert errors(json.loads(pair.to_json()), Against) == []
    assert errors(json.loads(pair.to_json())) != []


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"schema": 2}, "$.schema"),
        ({"seconds": "long"}, "$.seconds"),
        ({"extra": 1}, "$"),
        ({"rates": {}}, "$.rates"),
        ({"verdicts": [{"name": "forward"}]}, "$.verdicts[0]"),
    ],
)
def test_what_is_wrong_is_found(change: dict[str, Any], path: str) -> None:
    assert any(found.startswith(path) for found in errors(json.loads(full().to_json()) | change))


def test_every_field_is_required_and_described_where_the_code_does() -> None:
    definitions = schema()["$defs"]
    assert {"Check", "Ladder", "Profile", "Verdict", "Subject", "Theory", "RateLadder"} <= definitions.keys()
    for name, definition in definitions.items():
        assert definition["required"] == list(definition["properties"]), name
        assert definition["additionalProperties"] is False
    assert definitions["Profile"]["properties"]["rms"]["description"].startswith("√mean h²")
    assert definitions["Verdict"]["properties"]["level"]["enum"] == ["ok", "warn", "fail"]
