"""Packaging of retrax; settings of tools are in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = next(
    line.split('"')[1]
    for line in (HERE / "retrax/__init__.py").read_text().splitlines()
    if line.startswith("__version__")
)

BENCH = ["flax", "equinox", "dm-haiku", "keras"]
TEST = ["pytest", "pytest-xdist", "scikit-learn", "ruff", "pyright[nodejs]"]

setup(
    name="retrax",
    version=VERSION,
    description="Training deep networks from composable layers, on JAX.",
    long_description=(HERE / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=find_packages(include=["retrax", "retrax.*"]),
    package_data={
        "retrax": ["gin/*.gin", "py.typed"],
        "retrax.data": ["embedded/*"],
    },
    install_requires=[
        "jax>=0.10",
        "numpy",
        "gin-config",
        "absl-py",
        "psutil",
        "optax",
        "tqdm",
        "matplotlib",
        "tensorboardX",
    ],
    extras_require={
        "tf": ["tensorflow", "tensorflow-datasets"],
        "text": ["sentencepiece", "tokenizers"],
        "hf": ["datasets", "safetensors"],
        "test": TEST,
        "bench": BENCH,
        "docs": TEST,
    },
    entry_points={"console_scripts": ["retrax=retrax.cli:main"]},
    classifiers=[
        "License :: OSI Approved :: Apache Software License",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
