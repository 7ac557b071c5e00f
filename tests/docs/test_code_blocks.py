"""Every code block in the documents runs and prints what it says; every link leads on.

The blocks of a document run in order in one namespace, in a process and a directory of
their own. A ```text block that follows a ```python block is its output. The shell
commands are the business of tests/e2e.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

# Runs blocks of [line number, code] from a JSON file; prints an output for each.
RUNNER = """
import contextlib, io, json, sys, traceback, warnings
warnings.simplefilter("error")
outputs, scope = [], {"__name__": "__document__"}
for line, code in json.load(open(sys.argv[1])):
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            exec(compile("\\n" * line + code, sys.argv[2], "exec"), scope)
    except BaseException:
        traceback.print_exc()
        sys.exit(1)
    outputs.append(out.getvalue())
json.dump(outputs, open(sys.argv[1], "w"))
"""


def blocks_of(text):
    """Returns [(line of the opening fence, language, code, text before), ...]."""
    found, end = [], 0
    for match in FENCE.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        found.append((line, match[1], match[2], text[end : match.start()]))
        end = match.end()
    return found


def name(path):
    return str(path.relative_to(ROOT))


WITH_PYTHON = [path for path in DOCUMENTS if "```python" in path.read_text()]


@pytest.mark.parametrize("path", WITH_PYTHON, ids=name)
def test_python_blocks_run_and_print_what_they_say(path, tmp_path):
    blocks = blocks_of(path.read_text())
    python = [
        (line, code) for line, language, code, _ in blocks if language == "python"
    ]
    exchange = tmp_path / "blocks.json"
    exchange.write_text(json.dumps(python))
    folder = tmp_path / "cwd"
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", RUNNER, str(exchange), name(path)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr[-4000:]
    outputs = dict(
        zip([line for line, _ in python], json.loads(exchange.read_text()), strict=True)
    )
    for before, after in zip(blocks, blocks[1:], strict=False):
        is_output = after[1] == "text" and not after[3].strip()
        if before[1] == "python" and is_output:
            assert outputs[before[0]].rstrip() == after[2].rstrip(), f"line {before[0]}"


def environment():
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p)}


def test_readme_has_blocks_with_outputs():
    blocks = blocks_of((ROOT / "README.md").read_text())
    assert sum(language == "python" for _, language, _, _ in blocks) >= 8
    known = {"python", "text", "bash", "console", "gin"}
    assert {language for _, language, _, _ in blocks} <= known


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_relative_links_lead_to_files_and_headings(path):
    text = FENCE.sub("", path.read_text())
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, heading = target.partition("#")
        linked = (path.parent / file) if file else path
        assert linked.exists(), target
        if heading:
            assert heading in headings(linked.read_text()), target


def headings(text):
    titles = re.findall(r"^#+ (.*)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", t.lower()).replace(" ", "-") for t in titles}
