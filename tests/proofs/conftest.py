"""A file with what the proofs on a GPU found: _build/proofs.json."""

import datetime
import json
import os
from pathlib import Path

SUMMARY = Path(__file__).resolve().parents[2] / "_build" / "proofs.json"
proofs = []


def pytest_runtest_logreport(report):
    """Also called for the tests of parallel processes."""
    if report.when == "call":
        proofs.extend(value for name, value in report.user_properties if name == "proof")


def pytest_sessionfinish():
    """Operators that were not proven this time keep what an earlier run of these versions found."""
    if not proofs or "PROOFS_CASES" in os.environ:
        return
    shared = ("gpu", "torch", "triton", "seed")
    summary = {name: proofs[0][name] for name in shared}
    known = json.loads(SUMMARY.read_text("utf-8")) if SUMMARY.exists() else {}
    if any(known.get(name) != summary[name] for name in shared):
        known = {}
    rows = {row["operator"]: row for row in known.get("operators", [])}
    for proof in proofs:
        rows[proof["operator"]] = {k: v for k, v in proof.items() if k not in shared}
    summary["date"] = datetime.date.today().isoformat()
    summary["operators"] = [rows[name] for name in sorted(rows)]
    SUMMARY.parent.mkdir(exist_ok=True)
    SUMMARY.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
