"""Write a page of charts and tables as one HTML file that opens without a network."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from importlib import resources
from typing import Any

from megalite.errors import UserError
from megalite.report.time_report import Table

_NO_PLOTLY = "the report needs plotly: pip install plotly"
_SWITCH_THEME = (
    "const style = document.documentElement.style, dark = matchMedia('(prefers-color-scheme: dark)').matches;"
    "style.colorScheme = (style.colorScheme || (dark ? 'dark' : 'light')) === 'dark' ? 'light' : 'dark'"
)


def html_page(title: str, parts: Iterable[str]) -> str:
    """Return the whole page: a title, then parts in HTML.

    Raises:
        UserError: plotly is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise UserError(_NO_PLOTLY) from None
    title = escape(title)
    style = resources.files(__package__).joinpath("page.css").read_text()
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{style}</style><script>{get_plotlyjs()}</script></head>"
        f'<body><button id="theme" type="button" onclick="{_SWITCH_THEME}">light / dark</button>'
        f"<main><h1>{title}</h1>{''.join(parts)}</main></body></html>\n"
    )


def html_figure(figure: Mapping[str, Any], name: str) -> str:
    """Return a figure as HTML without Plotly's library, which is in the page's head.

    Raises:
        UserError: plotly is not installed.
    """
    try:
        from plotly.io import to_html
    except ImportError:
        raise UserError(_NO_PLOTLY) from None
    config = {"responsive": True, "displaylogo": False, "modeBarButtonsToRemove": ["select2d", "lasso2d"]}
    config["showSendToCloud"] = False  # plotly's default is a button that uploads the figure
    html: str = to_html(figure, config=config, include_plotlyjs=False, full_html=False, div_id=name)
    return f"<figure>{html}</figure>"


def html_table(table: Table) -> str:
    """Return a table without its title."""
    heads = "".join(f"<th>{escape(head)}</th>" for head in table.heads)
    rows = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in table.rows)
    return f"<table><tr>{heads}</tr>{rows}</table>"
