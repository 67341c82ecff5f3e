"""Takes widget views and widget state out of notebooks, which nbdev_clean leaves in: with them a code host may refuse to show a notebook.

    python .strip_widgets.py nbs/*.ipynb
"""
import json
import sys
from pathlib import Path

for path in map(Path, sys.argv[1:]):
    text = path.read_text(encoding="utf-8")
    nb = json.loads(text)
    changed = nb["metadata"].pop("widgets", None) is not None
    for output in (o for c in nb["cells"] for o in c.get("outputs", [])):
        for kind in [k for k in output.get("data", {}) if "widget" in k]:
            del output["data"][kind]
            changed = True
    if changed: path.write_text(json.dumps(nb, ensure_ascii=False, indent=1, sort_keys=True) + "\n", encoding="utf-8")
