"""Build the package, install it in fresh environments, and run the README's commands there, away from the checkout.

make test-install         base, hf and cluster
install.py base           one of them
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.documentation.commands import ROOT, Command, commands, reason_not_to_run, smaller
from tests.documentation.surroundings import write_surroundings

RAY = ("compare", "--on", "ray", "--schemes", "pre", "peri")
NEEDS_HF = "config.json"
"""A word of README's commands that need the extra `hf`."""


def main() -> None:
    wanted = sys.argv[1:] or ["base", "hf", "cluster"]
    with tempfile.TemporaryDirectory() as folder:
        wheel = build(Path(folder))
        for extra in wanted:
            environment = Path(folder) / extra
            install(environment, wheel, extra)
            CHECKS[extra](environment)
    print(f"{', '.join(wanted)}: installed and run")


def build(folder: Path) -> Path:
    """The source archive, and a wheel that is made from it alone; their contents are checked."""
    venv.create(folder / "tools", with_pip=True)
    tool(folder / "tools", "pip", "install", "--quiet", "hatchling>=1.26")
    run(folder / "tools" / "bin" / "hatchling", "build", "-t", "sdist", "-d", folder / "dist", cwd=ROOT)
    (source,) = (folder / "dist").glob("*.tar.gz")
    tool(
        folder / "tools", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", folder / "dist", source
    )
    (wheel,) = (folder / "dist").glob("*.whl")
    check_source(source)
    check_wheel(wheel)
    return wheel


def check_wheel(wheel: Path) -> None:
    """The package alone."""
    names = zipfile.ZipFile(wheel).namelist()
    strange = [
        name for name in names if not name.startswith("normlab/") and ".dist-info/" not in name.partition("/")[0] + "/"
    ]
    if strange:
        sys.exit(f"{wheel.name} holds more than the package: {strange[:5]}")
    files = [path for path in (ROOT / "normlab").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    missing = {path.relative_to(ROOT).as_posix() for path in files} - set(names)
    if missing:
        sys.exit(f"{wheel.name} lacks {sorted(missing)[:5]}")
    print(f"{wheel.name}: {len(names)} files, {wheel.stat().st_size / 1e6:.1f} MB")


def check_source(source: Path) -> None:
    """Enough to build, to test and to read; nothing that git ignores."""
    with tarfile.open(source) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    for needed in ("pyproject.toml", "LICENSE", "README.md", "normlab/py.typed", "tests/conftest.py", "docs/start.md"):
        if needed not in names:
            sys.exit(f"{source.name} lacks {needed}")
    strange = [name for name in names if name.startswith((".venv", "site/", "build/", "dist/"))]
    if strange:
        sys.exit(f"{source.name} holds {strange[:5]}")
    print(f"{source.name}: {len(names)} files, {source.stat().st_size / 1e6:.1f} MB")


def install(environment: Path, wheel: Path, extra: str) -> None:
    """A fresh environment with the wheel and one extra, and how long and large that was."""
    start = time.monotonic()
    venv.create(environment, with_pip=True)
    what = str(wheel) if extra == "base" else f"{wheel}[{extra}]"
    tool(environment, "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt", what)
    size = sum(path.lstat().st_size for path in environment.rglob("*") if not path.is_symlink())
    print(f"{extra}: {size / 1e9:.2f} GB, {time.monotonic() - start:.0f} s")


def check_base(environment: Path) -> None:
    """The README's commands, smaller; what needs an extra says which."""
    work = workplace(environment)
    for command in readme():
        if NEEDS_HF in " ".join(command.words):
            found = normlab(environment, work, smaller(command), expected=2)
            if "normlab[hf]" not in found.stderr:
                sys.exit(f"{command}: expected a line that names the extra hf, got {found.stderr}")
        else:
            # Each command starts anew: another comparison in the same folder is refused.
            shutil.rmtree(work / "comparison", ignore_errors=True)
            normlab(environment, work, smaller(command))
    told = normlab(environment, work, ("doctor",)).stdout
    if "not installed (ray)" not in told:
        sys.exit(f"doctor does not say that ray is missing:\n{told}")


def check_hf(environment: Path) -> None:
    work = workplace(environment)
    for command in readme():
        if NEEDS_HF in " ".join(command.words):
            normlab(environment, work, smaller(command))
    code = "import normlab.hf; from transformers import LlamaConfig, LlamaForCausalLM as M;"
    size = "vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2"
    run(
        environment / "bin" / "python",
        "-c",
        f"{code} print(normlab.hf.convert(M(LlamaConfig({size})), 'geonorm'))",
        cwd=work,
    )


def check_cluster(environment: Path) -> None:
    normlab(environment, workplace(environment), smaller(Command("install.py", RAY)))


CHECKS = {"base": check_base, "hf": check_hf, "cluster": check_cluster}


def readme() -> list[Command]:
    return [command for command in commands(ROOT / "README.md") if reason_not_to_run(command) is None]


def workplace(environment: Path) -> Path:
    """A folder away from the checkout with the files that the commands name; the package comes from the environment."""
    work = environment / "work"
    work.mkdir()
    write_surroundings(work)
    where = run(environment / "bin" / "python", "-c", "import normlab; print(normlab.__file__)", cwd=work).stdout
    if not where.startswith(str(environment)):
        sys.exit(f"the package was imported from {where}")
    return work


def normlab(
    environment: Path, work: Path, words: tuple[str, ...], *, expected: int = 0
) -> subprocess.CompletedProcess[str]:
    print("  normlab", *words, flush=True)
    return run(environment / "bin" / "normlab", *words, cwd=work, expected=expected)


def tool(environment: Path, *words: str | Path) -> None:
    os.environ["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
    run(environment / "bin" / "python", "-m", *words, cwd=environment)


def run(*words: str | Path, cwd: Path, expected: int = 0) -> subprocess.CompletedProcess[str]:
    """A command without the checkout on its path; ends this program if it exits with another code."""
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    clean["NORMLAB_CACHE"] = str(cwd / ".cache")
    found = subprocess.run(
        [str(word) for word in words], cwd=cwd, env=clean, capture_output=True, text=True, check=False
    )
    if found.returncode != expected:
        sys.exit(
            f"{' '.join(map(str, words))}\nexit code {found.returncode}\n{found.stdout[-3000:]}{found.stderr[-3000:]}"
        )
    return found


if __name__ == "__main__":
    main()
