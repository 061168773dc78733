"""`python -m tests.vectorised [--arch aarch64]`: with what the loops of `shm`'s reductions compute once compiled.

It compiles the sources for that architecture, as csrc/CMakeLists.txt does, disassembles them, and looks into each loop
for the instruction that combines many elements which it has loaded at once. It needs g++ and binutils for the
architecture (Debian: apt install g++-aarch64-linux-gnu) and torch's headers, which are those of any architecture.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("kernels", "half")
FLAGS = ("-std=c++20", "-O3", "-DNDEBUG", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off")
NAMES = {
    "c10::Half": "float16",
    "c10::BFloat16": "bfloat16",
    "c10::complex<float>": "complex64",
    "c10::complex<double>": "complex128",
    "float": "float32",
    "double": "float64",
    "unsigned char": "uint8",
    "signed char": "int8",
    "short": "int16",
    "int": "int32",
    "long": "int64",
}
# The functor or the function in a symbol's name -> the operation, and what its packed instruction may be.
OPERATIONS = {
    "multiplies": ("PRODUCT", r"f?mul"),
    "smaller": ("MIN", r"[su]min|cmgt|fcmgt"),
    "larger": ("MAX", r"[su]max|cmgt|fcmgt"),
    "bit_and": ("BAND", "and"),
    "bit_or": ("BOR", "orr"),
    "bit_xor": ("BXOR", "eor"),
    "plus": ("SUM", "f?add"),
    "reduce_numbers": ("AVG", "fdiv"),
    "add_two": ("SUM of 2", "f?add"),
    "scale": ("scaled copy", "fmul"),
    "widen": ("widened", r"fcvtl2?|u?shll2?"),
    "narrow": ("rounded", r"fcvtn2?|ushr"),
    "narrow_fast": ("rounded, FEAT_BF16", r"bfcvtn2?"),
    "add": ("SUM of 2", "fadd"),
    "add_fp16": ("SUM of 2, FEAT_FP16", "fadd"),
    "add_fast": ("SUM of 2, FEAT_BF16", "bfcvtn2?"),
}
# NEON has no product of 64-bit integers.
SCALAR = {("int64", "PRODUCT")}
IN_HALF = ("add_two<c10::Half>", "add_two<c10::BFloat16>")  # call half.cpp
WHOLE = ("16b", "8h", "4s", "2d")  # as many elements as a register holds


@dataclass
class Loop:
    """One function's loop.

    Attributes:
        dtype, operation: what it computes.
        found: packed instructions that do it on loaded elements, as `fadd 4s`.
    """

    dtype: str
    operation: str
    found: set[str] = field(default_factory=set)

    @property
    def is_right(self) -> bool:
        return any(one.endswith(WHOLE) for one in self.found) or (self.dtype, self.operation) in SCALAR


def missing(arch: str) -> str | None:
    """The program that is needed and not there."""
    programs = (f"{arch}-linux-gnu-{name}" for name in ("g++", "objdump"))
    return next((program for program in programs if shutil.which(program) is None), None)


def loops(arch: str = "aarch64", *flags: str) -> list[Loop]:
    """Compiles the sources, with further flags, and says of each loop with what it computes.

    Raises:
        subprocess.CalledProcessError: a source does not compile.
    """
    found: list[Loop] = []
    with tempfile.TemporaryDirectory() as folder:
        for source in SOURCES:
            target = Path(folder, f"{source}.o")
            subprocess.run([*_compiler(arch, source, target), *flags], check=True, cwd=ROOT)
            command = [f"{arch}-linux-gnu-objdump", "-d", "-r", "-C", "--no-show-raw-insn", str(target)]
            listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            for name, lines in _functions(listing).items():
                if (loop := _loop_of(name)) is not None:
                    loop[0].found = set(_packed(lines, loop[1]))
                    found.append(loop[0])
    return found


def _compiler(arch: str, source: str, target: Path) -> list[str]:
    torch = importlib.util.find_spec("torch")
    assert torch is not None
    assert torch.submodule_search_locations is not None
    headers = Path(torch.submodule_search_locations[0], "include")
    folders = (headers, headers / "torch/csrc/api/include", sysconfig.get_path("include"))
    file = ROOT / "csrc/comm/shared_memory" / f"{source}.cpp"
    included = ["-Icsrc", *(f"-isystem{folder}" for folder in folders)]
    return [f"{arch}-linux-gnu-g++", *FLAGS, *included, "-c", str(file), "-o", str(target)]


def _functions(listing: str) -> Mapping[str, list[str]]:
    """Instructions of each function by its name, without our namespaces."""
    functions: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in listing.splitlines():
        if head := re.fullmatch(r"[0-9a-f]+ <(.*)>:", line):
            name = re.sub(r"ddp_lab::shared_memory::|\(anonymous namespace\)::", "", head[1])
            lines = functions.setdefault(name, [])
        elif "\t" in line:
            lines.append(line.split("\t", 1)[1])
    return functions


def _loop_of(name: str) -> tuple[Loop, str] | None:
    """The loop that a function is, and a pattern for its instruction; None of another function."""
    if name.startswith(tuple(f"void {call}" for call in IN_HALF)):
        return None
    if one := re.match(r"void (combine_all|add_two|scale)<(.*?)[,>(]", name):
        dtype = next(known for known in NAMES if re.match(rf"void \w+<{re.escape(known)}[ ,>]", name))
        if one[1] == "combine_all":
            functors = [key for key in OPERATIONS if re.search(rf"\b{key}(<|::)", name)]
            key = "reduce_numbers" if "reduce_numbers" in functors else functors[0]
        else:
            key = one[1]
        operation, pattern = OPERATIONS[key]
        is_float = NAMES[dtype].startswith(("float", "bfloat", "complex"))
        return Loop(NAMES[dtype], operation), pattern.replace("f?", "f" if is_float else "")
    if one := re.match(r"(widen|narrow(?:_fast)?|add(?:_fast|_fp16)?)\((.*)", name):
        dtype = "c10::Half" if "c10::Half" in one[2] else "c10::BFloat16"
        if one[1] in ("narrow_fast", "add_fast") and dtype == "c10::Half":
            return None  # which every aarch64 has
        operation, pattern = OPERATIONS[one[1]]
        return Loop(NAMES[dtype], operation), pattern
    return None


def _packed(lines: list[str], pattern: str) -> Iterator[str]:
    """Packed instructions of that pattern, as `fadd 4s`, one of whose operands comes from a load of many elements: the
    compiler also computes addresses in vectors."""
    loaded: set[str] = set()
    for line, after in zip(lines, [*lines[1:], ""], strict=True):
        operation, _, words = line.partition("\t")
        registers = re.findall(r"\b[qvd](\d+)\b", words.partition("//")[0])
        if not registers:
            continue
        if re.fullmatch(r"ldr|ldur|ldp|ld[1-4]", operation):
            is_constant = "R_AARCH64" in after
            loaded.update(registers if not is_constant and re.search(r"\bq\d|\bv\d", words) else [])
            continue
        if operation.startswith("st"):
            continue
        target, *operands = registers
        if not loaded.intersection(operands):
            loaded.discard(target)
            continue
        loaded.add(target)
        shape = re.match(r"v\d+\.(\d+[bhsd])", words)
        if shape and re.fullmatch(pattern, operation):
            yield f"{operation} {shape[1]}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.vectorised", description=__doc__.split("\n\n")[0])
    parser.add_argument("--arch", default="aarch64", choices=["aarch64"], help="architecture (default: aarch64)")
    arch = parser.parse_args(argv).arch
    if (program := missing(arch)) is not None:
        sys.exit(f"missing {program} (Debian: apt install g++-{arch}-linux-gnu)")
    found = sorted(loops(arch), key=lambda loop: (list(NAMES.values()).index(loop.dtype), loop.operation))
    for loop in found:
        words = ", ".join(sorted(loop.found)) or ("one by one" if loop.is_right else "NOT VECTORISED")
        print(f"{loop.dtype:11} {loop.operation:20} {words}")
    wrong = sum(not loop.is_right for loop in found)
    print(f"{len(found)} loops, {wrong} not vectorised that could be")
    return int(wrong > 0 or not found)


if __name__ == "__main__":
    sys.exit(main())
