"""Debian systems in folders, of another architecture or with another Python, in which the project's tests run.

They need root, mmdebstrap, and for another architecture QEMU, through which Linux starts its programs (binfmt_misc).
What is missing is installed where Debian's packages can be had. A root stays in its folder for the next run.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from csrc.install import PROJECT, UV, pips_settings, uvs_environment

ROOT = PROJECT.parent
# Debian's releases by the Python that each has; ddp_lab needs 3.10.
SUITES = {"3.11": "bookworm", "3.13": "trixie", "3.14": "forky"}
TREE, VENV = Path("/srv/ddp_lab"), Path("/srv/venv")  # as seen from within a root
_ARCHITECTURES = {"aarch64": "arm64", "x86_64": "amd64"}  # Debian's names
_BINFMT = Path("/proc/sys/fs/binfmt_misc")
_PROCESSORS = Path("devices/system/cpu")
# What every run mounts anew, and what ends with it: mounts and all processes.
_ENTER = ["unshare", "--mount", "--pid", "--ipc", "--fork", "--kill-child", "bash", "-euc"]
_MOUNTS = """
root=$1; shift
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
exec chroot "$root" "$@"
"""


class Missing(Exception):
    """Why such a root can't be had on this machine."""


@dataclass(frozen=True)
class Root:
    """One Debian system.

    Args:
        folder: holds the system and what is prepared for it.
        python: the version of its Python, a key of SUITES.
        arch: as `platform.machine` names it.
        packages: Debian's, beside Python.
    """

    folder: Path
    python: str
    arch: str
    packages: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        """Its / as seen from here. The dot keeps setuptools, which looks for packages everywhere, out."""
        return self.folder / f"{SUITES[self.python]}.{self.arch}"

    @property
    def site_packages(self) -> Path:
        """Those of its environment, as seen from within."""
        return VENV / "lib" / f"python{self.python}" / "site-packages"

    def within(self, path: Path) -> Path:
        """Where a path of the root is for this machine."""
        return self.path / path.relative_to("/")

    def make(self) -> None:
        """Makes the system and an empty environment, unless they are there.

        Raises:
            Missing: it can't be had here.
        """
        done = self.folder / "made"
        if done.exists():
            return
        if os.geteuid() != 0:
            raise Missing("mounts and a system in a folder need root")
        need("mmdebstrap", "mmdebstrap", "arch-test", "debian-archive-keyring")
        if self.arch != platform.machine():
            emulate(self.arch)
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            shutil.rmtree(self.path)
        suite = SUITES[self.python]
        print(f"making {self.path}: Debian {suite} for {self.arch}", flush=True)
        packages = ",".join(("python3", "python3-venv", "libgomp1", *self.packages))
        wanted = [f"--arch={_ARCHITECTURES[self.arch]}", "--variant=apt", f"--include={packages}"]
        options = ['--aptopt=Acquire::Check-Valid-Until "false"']
        # In a namespace of its own, so that none of its mounts is left.
        command = ["unshare", "--mount", "mmdebstrap", "--quiet", *wanted, *options, suite, self.path]
        made = subprocess.run(command, check=False)
        if made.returncode != 0:
            raise Missing(f"mmdebstrap could not make Debian {suite} for {self.arch}")
        # How this machine reaches a package index.
        for shared in ("etc/resolv.conf", "etc/ssl/certs/ca-certificates.crt"):
            if Path("/", shared).exists() and (self.path / shared).parent.exists():
                shutil.copyfile(Path("/", shared), self.path / shared)
        # Of the host's /sys torch would read another processor's properties.
        for name in ("possible", "present", "online"):
            file = self.path / "sys" / _PROCESSORS / name
            file.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(Path("/sys") / _PROCESSORS / name, file)
        if self.run("/usr/bin/python3", "-m", "venv", VENV) != 0:
            raise Missing(f"its Python could not make an environment in {self.path}")
        done.touch()

    def run(self, *command: str | Path, cwd: Path = Path("/"), **variables: str) -> int:
        """Runs a command there, with its Python's programs on the PATH; all that it started ends with it."""
        environment = {
            "HOME": "/root",
            "LANG": "C.UTF-8",
            "PATH": f"{VENV}/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            **variables,
        }
        words = [f"{name}={value}" for name, value in environment.items()]
        step = ["/usr/bin/env", f"--chdir={cwd}", *words, *map(str, command)]
        return subprocess.run([*_ENTER, _MOUNTS, "bash", str(self.path), *step], check=False).returncode

    def install(self, *requirements: str) -> None:
        """Installs packages for its Python and architecture into its environment; this machine's uv fetches them, from
        where its pip would."""
        listed, wanted = self.folder / "requirements.txt", self.folder / "wanted.in"
        done, words = self.folder / "installed.in", "\n".join(requirements) + "\n"
        if done.exists() and done.read_text() == words:
            return
        wanted.write_text(words)
        there = [f"--python-platform={self.arch}-manylinux_2_28", f"--python-version={self.python}"]
        uv = [UV, "pip"]
        environment = uvs_environment(pips_settings(), os.environ)
        resolve = [*uv, "compile", *there, "--no-header", "--no-annotate", wanted, "-o", listed]
        subprocess.run(resolve, check=True, stdout=subprocess.DEVNULL, env=environment)
        print(f"installing {len(listed.read_text().splitlines())} packages for {self.arch}", flush=True)
        staging = self.folder / "staged.packages"
        shutil.rmtree(staging, ignore_errors=True)
        target = [f"--prefix={staging}", "--no-deps", "--only-binary=:all:", "--link-mode=hardlink"]
        subprocess.run([*uv, "install", "--quiet", *there, *target, "-r", listed], check=True, env=environment)
        [found] = staging.glob("lib/python*/site-packages")
        shutil.copytree(found, self.within(self.site_packages), copy_function=_link, dirs_exist_ok=True)
        shutil.rmtree(found)
        for script in staging.glob("bin/*"):
            first, _, rest = script.read_bytes().partition(b"\n")
            if first.startswith(b"#!"):
                script.unlink()  # it may be a link to uv's cache
                script.write_bytes(b"#!%s/bin/python\n%s" % (bytes(VENV), rest))
                script.chmod(0o755)
        shutil.copytree(staging, self.within(VENV), dirs_exist_ok=True)
        shutil.rmtree(staging)
        wanted.rename(done)

    def copy_tree(self, *without: str) -> None:
        """Copies the project's files there: what git knows or would add, but the folders `without`."""
        tree = self.within(TREE)
        shutil.rmtree(tree, ignore_errors=True)
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
        for name in names.rstrip("\0").split("\0"):
            if name.startswith(without) or not (ROOT / name).exists():
                continue
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name)


def emulate(arch: str) -> None:
    """Lets Linux start programs of another architecture through QEMU."""
    need(f"qemu-{arch}-static", "qemu-user-static")
    if not (_BINFMT / "register").exists():
        mounted = subprocess.run(["mount", "-t", "binfmt_misc", "binfmt_misc", _BINFMT], capture_output=True, text=True)
        if mounted.returncode != 0:
            raise Missing(f"binfmt_misc can't be mounted here: {mounted.stderr.strip()}")
    if (_BINFMT / f"qemu-{arch}").exists():
        return
    rule = Path(f"/usr/lib/binfmt.d/qemu-{arch}.conf").read_text().strip()
    try:
        (_BINFMT / "register").write_text(rule)
    except OSError as refused:
        raise Missing(f"binfmt_misc takes no rule here: {refused}") from refused


def need(program: str, *packages: str) -> None:
    """Installs Debian's packages if a program is not there."""
    if shutil.which(program) is not None:
        return
    install = f"apt-get update -qq && apt-get install -y -qq --no-install-recommends {' '.join(packages)}"
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    subprocess.run(["bash", "-c", f"{install} >/dev/null"], env=environment, check=False)
    if shutil.which(program) is None:
        raise Missing(f"missing {program} (Debian: apt install {' '.join(packages)})")


def _link(source: str, target: str) -> None:
    Path(target).unlink(missing_ok=True)
    os.link(source, target)
