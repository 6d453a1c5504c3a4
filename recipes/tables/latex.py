"""A table in LaTeX, for the package booktabs."""

from co2.record.table import Table


def latex(table: Table) -> str:
    """Where rows share a value of the first column, a rule stands wherever it changes."""
    lines, firsts = [], [row[0] for row in table.rows]
    for number, row in enumerate(table.texts(r"\textbf{{{}}}", _escaped)):
        if number > 0 and firsts[number] != firsts[number - 1] and len({*firsts}) < len(firsts):
            lines.append(r"\midrule")
        lines.append(" & ".join(row) + r" \\")
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{_escaped(f'{table.title}. {table.text}'.strip())}}}",
            rf"\begin{{tabular}}{{{'l' * len(table.head)}}}",
            r"\toprule",
            " & ".join(map(_escaped, table.head)) + r" \\",
            r"\midrule",
            *lines,
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )


_LATEX = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "%": r"\%",
        "_": r"\_",
        "&": r"\&",
        "#": r"\#",
        "<": "$<$",
        "≥": r"$\geq$",
        "≈": r"$\approx$",
        "±": r"$\pm$",
        "τ": r"$\tau$",
        "φ": r"$\varphi$",
        "β": r"$\beta$",
        "·": r"$\cdot$",
        "†": r"$\dagger$",
        "—": "---",
        "–": "--",
        "`": None,
    }
)


def _escaped(text: str) -> str:
    return text.translate(_LATEX)
