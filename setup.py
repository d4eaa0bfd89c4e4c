"""Adds the native extension to the build; everything else is in pyproject.toml."""

import importlib.util
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


def load_build_recipe():
    """Load exllamav3_ext/_build.py without importing its package, which would need the `.so`."""
    path = ROOT / "exllamav3_ext" / "_build.py"
    spec = importlib.util.spec_from_file_location("exllamav3_build_recipe", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


recipe = load_build_recipe()


def build_kind() -> str:
    """Kind of this build, or stop with what to do."""
    if not {"build_ext", "bdist_wheel", "editable_wheel", "install", "develop"} & set(sys.argv):
        return "none"  # metadata only
    try:
        if recipe.requested_kind() == "none":
            return "none"
        import torch  # noqa: F401
    except recipe.BuildError as error:
        raise SystemExit(f"exllamav3: {error}") from None
    except ImportError:
        raise SystemExit(
            "exllamav3: torch is not installed in this environment. Install torch >= 2.10 first, "
            "then run `pip install --no-build-isolation .` (without that option pip builds in an "
            "empty environment), or set EXLLAMAV3_BUILD=none to install without native code."
        ) from None
    try:
        return recipe.detect()
    except recipe.BuildError as error:
        raise SystemExit(f"exllamav3: {error}") from None


class BuildNative(build_ext):
    """Hands the one extension to the ninja driver of _build.py."""

    def build_extension(self, ext):
        target = Path(self.get_ext_fullpath(ext.name))
        try:
            recipe.build(KIND, ROOT / "build" / f"native-{KIND}", target)
        except recipe.BuildError as error:
            raise SystemExit(f"exllamav3: {error}") from None


KIND = build_kind()
native = [
    Extension(
        "exllamav3_ext._C",
        [str(Path("exllamav3_ext/csrc") / s.path) for s in recipe.sources(KIND)],
        py_limited_api=True,
    )
]
setup(
    ext_modules=[] if KIND == "none" else native,
    cmdclass={"build_ext": BuildNative},
    options={} if KIND == "none" else {"bdist_wheel": {"py_limited_api": "cp310"}},
)
