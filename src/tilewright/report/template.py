"""Pages from the templates of this package: the style sheet is inlined, text is escaped."""

from importlib import resources

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup


def read(name: str) -> str:
    """Read a template of this package."""
    return resources.files("tilewright.report").joinpath("templates", name).read_text(encoding="utf-8")


def fill(name: str, **context: object) -> str:
    """Fill the template `name`; returns HTML text.

    Args:
        name: file of this package.
        context: what the template names, besides `css` and `svg` (a function that marks a finished chart as HTML).
    """
    environment = Environment(
        loader=FunctionLoader(read), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template(name).render(css=Markup(read("page.css")), svg=_framed, **context)


def _framed(drawing: str) -> Markup:
    """A finished chart as HTML, in a frame that scrolls sideways where a narrow window would make its text small."""
    return Markup('<div class="drawing">{}</div>').format(Markup(drawing))
