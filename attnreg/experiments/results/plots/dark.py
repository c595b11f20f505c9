"""The same figure for dark pages."""

from __future__ import annotations

import colorsys
import pickle
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import Collection
from matplotlib.colors import to_rgba, to_rgba_array
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Text

PAGE = "#171717"


def on_dark(color: Any) -> tuple[float, float, float, float]:
    """Return a colour for dark pages: greys change sides, white becomes the page, dark colours become lighter.

    Example:
        >>> from matplotlib.colors import to_hex
        >>> to_hex(on_dark("white")) == PAGE, to_hex(on_dark("black")), to_hex(on_dark("#0072B2"))
        (True, '#ebebeb', '#1aacff')
    """
    red, green, blue, alpha = to_rgba(color)
    hue, light, saturation = colorsys.rgb_to_hls(red, green, blue)
    if max(red, green, blue) - min(red, green, blue) < 0.08:
        darkest = to_rgba(PAGE)[0]
        light = darkest + (0.92 - darkest) * (1 - light)
    else:
        light = max(light, 0.55)
    return *colorsys.hls_to_rgb(hue, light, saturation), alpha


def darkened(figure: Figure) -> Figure:
    """Return a copy of a figure for dark pages. Images, and text on them, keep their colours."""
    copy: Figure = pickle.loads(pickle.dumps(figure))
    FigureCanvasAgg(copy)
    on_images = {text for axes in copy.axes if axes.images for text in axes.texts}
    for artist in copy.findobj():
        if isinstance(artist, Axes):
            artist.tick_params(which="both", color=on_dark("black"), labelcolor=on_dark("black"))
        elif isinstance(artist, Text):
            if artist not in on_images:
                artist.set_color(on_dark(artist.get_color()))
        elif isinstance(artist, Line2D):
            _line(artist)
        elif isinstance(artist, Patch):
            face, edge = artist.get_facecolor(), artist.get_edgecolor()
            artist.set(facecolor=on_dark(face), edgecolor=on_dark(edge))
        elif isinstance(artist, Collection) and artist.get_array() is None:
            face, edge = (_each(colors) for colors in (artist.get_facecolor(), artist.get_edgecolor()))
            artist.set(facecolor=face, edgecolor=edge)
    return copy


def _line(line: Line2D) -> None:
    face, edge = line.get_markerfacecolor(), line.get_markeredgecolor()
    line.set_color(on_dark(line.get_color()))
    line.set_markerfacecolor(face if isinstance(face, str) and face == "none" else on_dark(face))
    line.set_markeredgecolor(edge if isinstance(edge, str) and edge == "none" else on_dark(edge))


def _each(colors: Any) -> Any:
    return np.array([on_dark(color) for color in to_rgba_array(colors)]).reshape(-1, 4)
