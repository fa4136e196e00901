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
    if proofs and "PROOFS_CASES" not in os.environ:
        shared = ("gpu", "torch", "triton", "seed")
        summary = {"date": datetime.date.today().isoformat()}
        summary |= {name: proofs[0][name] for name in shared}
        rows = [{k: v for k, v in proof.items() if k not in shared} for proof in proofs]
        summary["operators"] = sorted(rows, key=lambda row: row["operator"])
        SUMMARY.parent.mkdir(exist_ok=True)
        SUMMARY.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
