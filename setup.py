"""The top-level folders install as packhorse.kernels, packhorse.packed and packhorse.replay.

``packhorse/`` holds a symlink to each. Nothing here imports torch.
"""

from setuptools import find_namespace_packages, setup

setup(
    packages=find_namespace_packages(include=["packhorse", "packhorse.*"]),
    package_data={
        "packhorse": ["py.typed"],
        "packhorse.replay": ["data/*.npz", "data/tiny_moe/*", "data/tiny_glm4_moe/*"],
    },
)
