"""Tables in LaTeX, for a paper."""

from __future__ import annotations

import re

from attnreg.experiments.results.document import Table

_SPECIAL = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
_SPECIAL |= {sign: "\\" + sign for sign in "&%$#_{}"}


def latex(table: Table, caption: str) -> str:
    r"""Write a table with booktabs' rules; put ``\usepackage{booktabs}`` in the preamble.

    Example:
        >>> print(latex(Table(["method", "mean"], [["a_b", "-0.5"]]), "Scores"))
        \begin{table}
          \centering
          \caption{Scores}
          \begin{tabular}{lr}
            \toprule
            method & mean \\
            \midrule
            a\_b & $-0.5$ \\
            \bottomrule
          \end{tabular}
        \end{table}
        <BLANKLINE>
    """
    columns = "".join(table.align(column, "l", "r") for column in range(len(table.header)))
    rows = [" & ".join(_cell(cell) for cell in row) + r" \\" for row in table.rows]
    lines = [
        r"\begin{table}",
        r"  \centering",
        rf"  \caption{{{escaped(caption)}}}",
        rf"  \begin{{tabular}}{{{columns}}}",
        r"    \toprule",
        "    " + " & ".join(map(escaped, table.header)) + r" \\",
        r"    \midrule",
        *(f"    {row}" for row in rows),
        r"    \bottomrule",
        r"  \end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def escaped(text: str) -> str:
    """Escape the characters that LaTeX reads as commands."""
    return "".join(_SPECIAL.get(sign, sign) for sign in text)


def _cell(text: str) -> str:
    """Escape a cell; numbers and intervals go to math mode, which has a minus sign."""
    if re.fullmatch(r"[\[\]+\-0-9., <]*\d[\[\]+\-0-9., <]*", text) and "-" in text:
        return f"${text}$"
    return escaped(text).replace("<", r"$<$")
