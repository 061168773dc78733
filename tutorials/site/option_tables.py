"""Tables from the code itself: `<!-- options of NAME -->` on a page is one of options with their defaults.

NAME is a class of ddp_lab (the constructor's arguments, as its docstring describes them), a magic (`%cluster start`) or
a command (`ddp-lab run`).
"""

import argparse
import inspect
import re

import ddp_lab
from ddp_lab.cli import main
from ddp_lab.notebook import magics

_PLACE = re.compile(r"^<!-- options of (.+) -->$", re.MULTILINE)
_ARGUMENT = re.compile(r"^(\w+): ", re.MULTILINE)


def filled(page):
    """A page's text with its tables."""
    return _PLACE.sub(lambda found: table(found[1]), page)


def table(name):
    """The options of a class, a magic or a command, as Markdown."""
    return _of_class(getattr(ddp_lab, name)) if name.isidentifier() else _of_parser(parser_of(name))


def _of_class(owner):
    described = _described(inspect.getdoc(owner))
    lines = ["| argument | default | meaning |", "|---|---|---|"]
    for one in inspect.signature(owner).parameters.values():
        default = "required" if one.default is one.empty else f"`{one.default!r}`"
        lines.append(f"| `{one.name}` | {default} | {_cell(described[one.name])} |")
    return "\n".join(lines)


def _described(docstring):
    """The arguments of a docstring with what it says of each."""
    _, _, rest = docstring.partition("\nArgs:\n")
    lines = []
    for line in rest.splitlines():
        if line and not line.startswith(" "):
            break
        lines.append(line.removeprefix("    "))
    names = list(_ARGUMENT.finditer(text := "\n".join(lines)))
    ends = [*(one.start() for one in names[1:]), len(text)]
    return {one[1]: " ".join(text[one.end() : end].split()) for one, end in zip(names, ends, strict=True)}


def _cell(words):
    """A docstring's sentence as a cell of a table."""
    words = re.sub(r" \([^()]*\[Note: [^()]*\)", "", words)  # of the source
    return re.sub(r"``(.+?)``", r"`\1`", words).replace("|", "\\|")


# -- options of a line


def parser_of(name):
    """The parser of a magic or a command."""
    first, *rest = name.split()
    if first != "ddp-lab":
        made = magics._MAGICS[first.lstrip("%")][1]
    elif rest in (["run"], ["tune"]):
        from ddp_lab.launch import agent, tune

        return {"run": agent, "tune": tune}[rest[0]].parser()
    else:
        made = main._parser()
    for word in rest:
        [choices] = [one.choices for one in made._actions if isinstance(one, argparse._SubParsersAction)]
        made = choices[word]
    return made


def _of_parser(parser):
    lines = ["| option | default | meaning |", "|---|---|---|"]
    lines += [f"| `{_cell(named)}` | {default} | {_cell(meaning)} |" for named, default, meaning in options(parser)]
    return "\n".join(lines)


def options(parser):
    """A parser's options: how each is written, its default, what it means."""
    formatter = parser._get_formatter()
    for one in parser._actions:
        if one.help is argparse.SUPPRESS or one.dest in ("help", "help_torchrun"):
            continue
        value = "" if one.nargs == 0 else formatter._format_args(one, one.metavar or one.dest.upper())
        named = f"{', '.join(one.option_strings)} {value}".strip()
        meaning, default = _default(one, formatter._expand_help(one))
        yield named, default, meaning


def _default(action, words):
    """What an option means, and its default: where the help ends in it in brackets, what stands there."""
    found = re.search(r" \((?:default: )?([^()]*)\)$", words)
    if found and ("default: " in found[0] or "%(default)" in action.help):
        return words[: found.start()], found[1]
    if action.nargs == 0:
        return words, "off"
    if action.required:
        return words, "required"
    return words, "none" if action.default in (None, [], "") else f"`{action.default}`"
