"Packaging of vllm_mlx: every value is read from settings.ini."
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
parser = ConfigParser(delimiters=["="])
parser.read(here/"settings.ini", encoding="utf-8")
cfg = parser["DEFAULT"]

suffix = "_requirements"
extras = {key[:-len(suffix)]: value.split() for key, value in cfg.items() if key.endswith(suffix)}

setup(
    name=cfg["lib_name"], version=cfg["version"], description=cfg["description"],
    long_description=(here/"README.md").read_text(encoding="utf-8") if (here/"README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0", author=cfg["author"], author_email=cfg["author_email"],
    keywords=cfg["keywords"].split(), url=cfg["git_url"],
    packages=find_packages(include=["vllm_mlx", "vllm_mlx.*"]),
    package_data={"vllm_mlx": ["data/*", "data/*/*"]},
    include_package_data=True,
    python_requires=f">={cfg['min_python']}",
    install_requires=cfg["requirements"].split(),
    extras_require=extras,
    entry_points={"console_scripts": cfg["console_scripts"].split(),
                  "nbdev": [f"{cfg['lib_name']}={cfg['lib_name']}._modidx:d"]},
    classifiers=["Programming Language :: Python :: 3", "Operating System :: MacOS", "Operating System :: POSIX :: Linux"],
    zip_safe=False,
)
