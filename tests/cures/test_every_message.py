"""Every message that names a cure has a test that types it, or is listed as one without.

The tests of this folder, and those in `ELSEWHERE`, type cures; a message counts as typed where one of them has a piece
of its text that no other message has. `untyped.py` lists the others, and may only become shorter. Texts that are put
together before they are raised are not found.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

from .untyped import UNTYPED

TESTS = Path(__file__).parent.parent
SOURCE = TESTS.parent / "pipeback"
ELSEWHERE = (
    "draw/test_draw.py",
    "laws/test_outside_ticks.py",
    "laws/test_vectorized_compiled.py",
    "laws/test_views_in_place.py",
    "lightning/test_checkpoint_file.py",
    "lightning/test_followed_step_with_a_store.py",
    "lightning/test_tuner.py",
    "pipeline/test_by_name.py",
    "pipeline/test_grad_modes.py",
    "pipeline/test_held_out.py",
    "pipeline/test_method_choice.py",
    "processes/test_runtimes.py",
    "splitting/test_changed_buffers.py",
    "splitting/test_draws_outside.py",
    "splitting/test_following.py",
    "splitting/test_one_stage.py",
    "splitting/test_returned_as_given.py",
    "splitting/test_saved_forms.py",
    "splitting/test_value_reads.py",
    "splitting/test_written_into.py",
    "splitting/test_vmap_calls.py",
    "stages/test_foreign_weights.py",
)
VERBS = (
    "use|set|pass|add|give|install|leave|push|put|build|call|start|write|choose|wrap|keep|say|for example|did you mean"
)
CURE = re.compile(rf"(?:[;,:(] |, or |and )(?:{VERBS})\b")
PIECE = 14  # characters that a test and a message must share


def text(node: ast.AST) -> str:
    """The text of a string, with {} for what is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text(part) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    if isinstance(node, ast.BinOp):
        return text(node.left) + text(node.right)
    return "{}"


def messages() -> set[str]:
    """The texts that are raised or warned of, and name a cure."""
    found = set()
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if isinstance(node, ast.Call) and node.args and re.search(r"(Error|\bwarn)$", called):
                told = text(node.args[0])
                if CURE.search(told):
                    found.add(told)
    return found


def pieces() -> set[str]:
    """All runs of characters that strings of the tests have, which may be regular expressions."""
    found = set()
    for path in [*Path(__file__).parent.glob("*.py"), *(TESTS / name for name in ELSEWHERE)]:
        if path.name in ("untyped.py", Path(__file__).name):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                for piece in re.split(r"\.\*\??|\\d\+?|\|", node.value):
                    plain = piece.replace("\\", "")
                    found |= {plain[n : n + PIECE] for n in range(len(plain) - PIECE + 1)}
    return found


def cut(told: str) -> set[str]:
    """The runs of characters of a message."""
    return {told[n : n + PIECE] for n in range(len(told) - PIECE + 1)}


def untyped() -> set[str]:
    known, told = pieces(), messages()
    often = Counter(piece for each in told for piece in cut(each))
    return {each for each in told if not any(often[piece] == 1 and piece in known for piece in cut(each))}


def test_a_new_message_with_a_cure_has_a_test_that_types_it():
    new = untyped() - UNTYPED
    assert not new, f"type their cures in a row of tests/cures: {sorted(new)}"


def test_the_list_of_those_without_is_true():
    done = UNTYPED - untyped()
    assert not done, f"these are typed, or said no more; take them out of untyped.py: {sorted(done)}"


def test_messages_are_found():
    assert len(messages()) > 150
