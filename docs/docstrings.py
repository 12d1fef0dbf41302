"""The project's docstrings are plain text; Sphinx wants reStructuredText. This says the one in the other.

a paragraph                   a paragraph, `code` in it as code, everything else escaped
name: what it means           a paragraph of its own, where a sentence has ended before it
name     what it means        a definition list, if two lines or more look so, or one that goes on below
| a | table |                 a table
    an indented block         a block of code, as it stands: equations, drawings, examples
>>> an example                likewise

The fields of a named tuple have no docstrings; the comments beside or above them are shown instead.
"""

import inspect
import re

NAME = re.compile(r"[\w.*=()\"']+(, [\w.*=()\"']+)*")
PARAMETER = re.compile(r"([a-z]\w*(?:, [a-z]\w*)*): ")
FIELD = re.compile(r"    (?:(?P<name>\w+): .*?)?(?:  # |(?<=    )# |$)(?P<comment>.*)")


def as_restructured_text(app, what, name, obj, options, lines):
    """For Sphinx's event autodoc-process-docstring: changes `lines` in place."""
    lines[:] = converted(lines)
    if what == "class" and hasattr(obj, "_fields"):
        lines += entries(commented_fields(obj))


def without_fields(app, what, name, obj, skip, options):
    """For Sphinx's event autodoc-skip-member: "Alias for field number 0" tells nothing."""
    return True if (getattr(obj, "__doc__", None) or "").startswith("Alias for field number") else None


def commented_fields(kind):
    """(name, lines of the comment) of every field of a named tuple that has a comment."""
    found, above = [], []
    for line in inspect.getsource(kind).splitlines():
        match = FIELD.fullmatch(line)
        if match is None or not (match["name"] or match["comment"]):
            above = []
        elif match["name"] not in kind._fields:
            above.append(match["comment"])
        else:
            text = [*above, *filter(None, [match["comment"]])]
            above = []
            if text:
                found.append((match["name"], text))
    return found


def converted(lines):
    found = []
    for block in blocks(lines):
        found += [*rendered(block), ""]
    return found


def blocks(lines):
    """Runs of lines without an empty one; indented runs that follow each other are one block."""
    block = []
    for line in [*lines, ""]:
        if line.strip():
            block.append(line)
        elif block:
            yield block
            block = []


def rendered(block):
    if all(line.startswith("    ") for line in block):
        return literal([line[4:] for line in block])
    if block[0].startswith(">>>"):
        return literal(block, "python")
    if all(line.startswith("|") for line in block):
        return table(block)
    if found := definitions(block):
        return found
    if found := definitions(block[1:]):  # below a line that says what they are
        return [f"**{escaped(block[0].strip())}**", "", *found]
    for n, line in enumerate(block):  # a paragraph that an indented block follows without an empty line
        if n and line.startswith("    "):
            return [*rendered(block[:n]), "", *rendered(block[n:])]
        if n and line.startswith("|"):
            return [*rendered(block[:n]), "", *rendered(block[n:])]
        if n and block[n - 1].endswith(".") and PARAMETER.match(line):
            return [*rendered(block[:n]), "", *rendered(block[n:])]
    if match := PARAMETER.match(block[0]):
        names = ", ".join(f"``{name}``" for name in match[1].split(", "))
        return [f"{names}: {escaped(block[0][match.end() :])}", *(escaped(line.strip()) for line in block[1:])]
    return [escaped(line.strip()) for line in block]


def literal(lines, language="text"):
    return [f".. code-block:: {language}", "", *("    " + line for line in lines)]


def table(lines):
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines]
    width = max(map(len, rows))
    found = [".. list-table::", "    :header-rows: 1", ""]
    for row in rows:
        for n, cell in enumerate([*row, *[""] * (width - len(row))]):
            found.append(f"    {'*' if n == 0 else ' '} - {escaped(cell)}")
    return found


def definitions(block):
    """A list of names, each with its meaning beside it, whose lines below are indented; None if the block is none."""
    column = min((indent(line) for line in block if indent(line) >= 4), default=None)
    listed = []
    for line in block:
        if indent(line):
            if not listed:
                return None
            listed[-1][1].append(line.strip())
            continue
        names, text = beside(line, column)
        if not text or not NAME.fullmatch(names):
            return None
        listed.append((names, [text]))
    if len(listed) < 2 and sum(len(text) for _, text in listed) < 2:
        return None
    return entries(listed)


def entries(listed):
    """A definition list of (names, lines of text)."""
    found = []
    for names, text in listed:
        found += [
            ", ".join(f"``{name}``" for name in names.split(", ")),
            *(f"    {escaped(line)}" for line in text),
            "",
        ]
    return found


def indent(line):
    return len(line) - len(line.lstrip())


def beside(line, column):
    """The names of an entry and the text beside them, which begins at `column` or after two spaces."""
    if column is not None and line[column - 1 : column] == " " and line[column : column + 1].strip():
        return line[:column].strip(), line[column:].strip()
    names, _, text = line.partition("  ")
    return names.strip(), text.strip()


def escaped(line):
    """Code between backticks as code; all else as it stands."""
    parts = re.split(r"(`[^`]+`)", line)
    return "".join(code(part) if part.startswith("`") and len(part) > 1 else plain(part) for part in parts)


def code(part):
    return f"``{part.strip('`')}``\\ "


def plain(part):
    return re.sub(r"([\\*|_`])", r"\\\1", part)
