"""How README.md is made from nbs/index.ipynb. From the top of the project:

    jupyter nbconvert --config .nbconvert.py

Pictures go to nbs/images/. Cells marked `#| hide` stay out, `#|` lines are dropped, and links that are
relative to nbs/, where the notebook lies, become relative to the top, where README.md lies.
"""
import posixpath
import re

from nbconvert.preprocessors import Preprocessor

c = get_config()  # noqa: F821 (given by traitlets)


def from_the_top(link):
    "`link` as it is seen from the folder of README.md."
    outside = re.match(r"[a-z]+:|[#/]", link)
    return link if outside else posixpath.normpath(posixpath.join("nbs", link))


class ForReadme(Preprocessor):
    "The index notebook as its reader on a code host should see it."
    def preprocess(self, nb, resources):
        nb.metadata["language_info"] = {"name": "python"}
        nb.cells = [cell for cell in nb.cells if not re.match(r"\s*#\|\s*hide\b", cell.source)]
        for cell in nb.cells:
            if cell.cell_type == "code":
                cell.source = re.sub(r"^#\|.*\n?", "", cell.source, flags=re.M).strip()
            else:
                cell.source = re.sub(r'(\]\(|\bsrc="|\bhref=")([^)"\s]+)',
                                     lambda m: m[1] + from_the_top(m[2]), cell.source)
        return nb, resources


c.NbConvertApp.notebooks = ["nbs/index.ipynb"]
c.NbConvertApp.export_format = "markdown"
c.NbConvertApp.output_base = "README"
c.NbConvertApp.output_files_dir = "nbs/images"
c.FilesWriter.build_directory = "."
c.MarkdownExporter.preprocessors = [ForReadme]
