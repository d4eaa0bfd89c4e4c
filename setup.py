"""Adds the native extension to the build; everything else is in pyproject.toml."""

import importlib
import sys
import types
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


# The recipe lies in the package that is to be built, whose __init__ needs the result.
recipe_package = types.ModuleType("exllamav3_build")
recipe_package.__path__ = [str(ROOT / "exllamav3_ext")]
sys.modules["exllamav3_build"] = recipe_package
recipe = importlib.import_module("exllamav3_build._build")
driver = importlib.import_module("exllamav3_build._driver")


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
    """Hands the one extension to the ninja driver."""

    def build_extension(self, ext):
        target = Path(self.get_ext_fullpath(ext.name))
        try:
            driver.build(KIND, ROOT / "build" / f"native-{KIND}", target)
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
