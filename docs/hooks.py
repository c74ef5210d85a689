"""What the site's build adds to the Markdown: the help of every command, and equations as MathML."""

from __future__ import annotations

import contextlib
import html
import io
import re

from latex2mathml.converter import convert

from vla_rl.cli.main import COMMANDS, parse

EQUATION = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_markdown(markdown: str, page: object, **_: object) -> str:
    """``<!-- help of every command -->`` becomes a section per command."""
    if "<!-- help of every command -->" not in markdown:
        return markdown
    sections = [f"## vla-rl {name}\n\n```text\n{help_of(name)}\n```\n" for name in COMMANDS]
    return markdown.replace("<!-- help of every command -->", "\n".join(sections))


def help_of(command: str) -> str:
    """What ``vla-rl COMMAND --help`` prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        parse([*command.split(), "--help"])
    return out.getvalue().strip()


def on_page_content(content: str, page: object, **_: object) -> str:
    """Equations need no script and no other host."""

    def mathml(match: re.Match[str]) -> str:
        display = "block" if match[1] == "div" else "inline"
        return str(convert(html.unescape(match[2]), display=display))

    return EQUATION.sub(mathml, content)
