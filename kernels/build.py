#!/usr/bin/env python3
"""Makes the PTX of the kernels, and checks what the assembler makes of it. Needs neither a GPU nor
a driver.

  kernels/build.py                writes kernels/kernels.ptx.zst, and kernels/resources.txt: what the
                                  assembler says of every kernel on every chip; fails if one spills
  kernels/build.py --check        fails unless the PTX is what the sources give, and the assembler
                                  says of some modules what resources.txt does
  kernels/build.py --check-all    the same of all modules, which takes two minutes

NVRTC and ptxas come from pip packages (kernels/install-tools.sh), in the directory that
KVFS_CUDA_TOOLS names or in target/test-tools/cuda. zstd(1) compresses.

The product holds modules, one for each dtype and width, so that a driver compiles only the one that
is used; it remembers what it compiled. There is one target, the oldest: NVRTC gives the same text
for compute_75, 80 and 90, and but for the extraction of bit fields for compute_52.
"""
import argparse
import ctypes
import hashlib
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

HERE = pathlib.Path(__file__).resolve().parent
PRODUCT = HERE / "kernels.ptx.zst"
RESOURCES = HERE / "resources.txt"
TOOLS = pathlib.Path(os.environ.get("KVFS_CUDA_TOOLS", HERE.parent / "target/test-tools/cuda"))

ELEMENTS = ["F16", "Bf16", "F32", "F8E4m3", "Q8_0", "Q4_0"]
DTYPES = ["f16", "bf16", "f32", "f8_e4m3", "q8_0", "q4_0"]
WIDTHS = [64, 128, 256]
TARGET = "compute_52"
# Decides how old a driver may be: the first version that knows shuffles of named lanes (CUDA 9).
PTX_VERSION = "6.0"
CHIPS = ["sm_52", "sm_61", "sm_75", "sm_80", "sm_90a"]
# More leave less than two blocks of 128 threads on a multiprocessor.
REGISTERS_MAX = 255
SHARED_BYTES_MAX = 48 << 10
# The assembler is a function of what it is given: these show that it is the one of the table.
SAMPLE = ["common", "f16_128"]


def modules():
    """Names of modules and the options that make them."""
    yield "common", []
    for element, dtype in zip(ELEMENTS, DTYPES):
        for width in WIDTHS:
            yield f"{dtype}_{width}", [f"-DKVFS_ELEMENT={element}", f"-DKVFS_WIDTH={width}"]


def source_hash():
    """Of everything that decides what the product is."""
    digest = hashlib.sha256()
    for path in sorted([*HERE.glob("*.h"), *HERE.glob("*.cu"), HERE / "build.py"]):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


class Nvrtc:
    def __init__(self):
        path = TOOLS / "nvidia/cuda_nvrtc/lib/libnvrtc.so.12"
        if not path.is_file():
            sys.exit(f"build.py: no {path}: run kernels/install-tools.sh")
        # It looks for this one by its bare name.
        ctypes.CDLL(str(path.with_name("libnvrtc-builtins.so.12.9")), ctypes.RTLD_GLOBAL)
        self.library = ctypes.CDLL(str(path))
        major, minor = ctypes.c_int(), ctypes.c_int()
        self.library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        self.version = f"{major.value}.{minor.value}"

    def text(self, program, what):
        size = ctypes.c_size_t()
        getattr(self.library, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        getattr(self.library, f"nvrtcGet{what}")(program, buffer)
        return buffer.value.decode()

    def compile(self, options):
        program = ctypes.c_void_p()
        source = (HERE / "kernels.cu").read_bytes()
        created = self.library.nvrtcCreateProgram(
            ctypes.byref(program), source, b"kernels.cu", 0, None, None)
        if created != 0:
            sys.exit(f"build.py: nvrtcCreateProgram gives {created}")
        options = [f"--gpu-architecture={TARGET}", "--std=c++17", f"--include-path={HERE}",
                   "-default-device", *options]
        encoded = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
        result = self.library.nvrtcCompileProgram(program, len(options), encoded)
        log = self.text(program, "ProgramLog")
        # Warnings are errors, but for the one that CUDA 13 will leave Maxwell and Pascal behind.
        log = re.sub(r"(?m)^nvrtc: warning: Architectures prior to .* are deprecated .*$", "", log)
        if result != 0 or log.strip():
            sys.exit(f"build.py: {' '.join(options)}:\n{log}")
        ptx = self.text(program, "PTX")
        self.library.nvrtcDestroyProgram(ctypes.byref(program))
        # A hint that only newer versions know.
        ptx = re.sub(r'(?m)^\s*\.pragma "used_bytes_mask .*\n', "", ptx)
        return re.sub(r"(?m)^\.version .*$", f".version {PTX_VERSION}", ptx, count=1)


def compile_one(options):
    nvrtc = Nvrtc()
    return nvrtc.version, nvrtc.compile(options)


def compile_modules():
    """The version of NVRTC, and module -> PTX."""
    # NVRTC compiles one program at a time in a process.
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        tasks = {name: pool.submit(compile_one, options) for name, options in modules()}
        made = {name: task.result() for name, task in tasks.items()}
    return made["common"][0], {name: ptx for name, (_, ptx) in made.items()}


def render(version, made):
    lines = [f"// kvfs kernels, sources {source_hash()}, NVRTC {version}\n"]
    for name, ptx in made.items():
        lines.append(f"// module {name}\n{ptx.strip()}\n")
    return "".join(lines).encode()


def resources(chip, name, ptx, directory):
    """What each kernel of a module takes on a chip: [kernel, registers, shared bytes, problem]."""
    path = pathlib.Path(directory) / f"{name}_{chip}"
    path.write_text(ptx)
    command = [TOOLS / "nvidia/cuda_nvcc/bin/ptxas", "-v", f"-arch={chip}", path,
               "-o", path.with_suffix(".cubin")]
    log = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    found = re.findall(r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes "
                       r"spill stores, (\d+) bytes spill loads.*?Used (\d+) registers(.*?)$",
                       log, re.S | re.M)
    kernels = re.findall(r"\.entry (\w+)", ptx)
    if sorted(kernel for kernel, *_ in found) != sorted(kernels):
        sys.exit(f"build.py: {name} on {chip}: ptxas says nothing of some kernels:\n{log}")
    rows = []
    for kernel, stack, stores, loads, registers, rest in found:
        shared = re.search(r"(\d+) bytes smem", rest)
        shared = int(shared.group(1)) if shared else 0
        fits = int(registers) <= REGISTERS_MAX and shared <= SHARED_BYTES_MAX
        fits &= stack == stores == loads == "0"
        rows.append((kernel, int(registers), shared, "" if fits else
                     f"stack {stack}, spills {stores} + {loads} bytes"))
    return rows


def table(made):
    """Lines of resources.txt of some modules, and what is wrong."""
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(os.cpu_count()) as pool:
        tasks = {(chip, name): pool.submit(resources, chip, name, ptx, directory)
                 for chip in CHIPS for name, ptx in made.items()}
        rows, problems = {}, []
        for (chip, name), task in tasks.items():
            for kernel, registers, shared, problem in task.result():
                rows.setdefault((name, kernel), []).append((registers, shared))
                if problem:
                    problems.append(f"{name} {kernel} on {chip}: {registers} registers, "
                                    f"{shared} bytes shared, {problem}")
    lines = [" ".join([name, kernel, *[str(registers) for registers, _ in row],
                       str(max(shared for _, shared in row))])
             for (name, kernel), row in rows.items()]
    return lines, problems


def write(text, made):
    lines, problems = table(made)
    if problems:
        return problems
    command = ["zstd", "-19", "--long=27", "-q", "-f", "-o", PRODUCT]
    subprocess.run(command, input=text, check=True)
    head = [f"# Registers of each kernel, without spills, and shared bytes; sources {source_hash()}",
            " ".join(["module kernel", *CHIPS, "shared"])]
    RESOURCES.write_text("\n".join([*head, *sorted(lines), ""]))
    return []


def check(text, made, names):
    lines, problems = table({name: made[name] for name in names})
    known = RESOURCES.read_text().splitlines()
    problems += [f"{RESOURCES} does not have: {line}" for line in lines if line not in known]
    unpacked = subprocess.run(["zstd", "-dcq", PRODUCT], capture_output=True, check=False)
    if unpacked.stdout != text:
        problems.append(f"{PRODUCT} is not what the sources give: run kernels/build.py")
    print(f"{len(lines)} kernels on {len(CHIPS)} chips, {len(problems)} problems")
    return problems


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    parser.add_argument("--check-all", action="store_true", help="the same, of all modules")
    arguments = parser.parse_args()
    version, made = compile_modules()
    text = render(version, made)
    if arguments.check or arguments.check_all:
        problems = check(text, made, made if arguments.check_all else SAMPLE)
    else:
        problems = write(text, made)
    if problems:
        sys.exit("\n".join(["build.py:", *problems]))


if __name__ == "__main__":
    main()
