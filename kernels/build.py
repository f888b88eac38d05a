#!/usr/bin/env python3
"""Makes the PTX of the kernels, and checks what the assembler makes of it. Needs neither a GPU nor
a driver.

  kernels/build.py            writes kernels/kernels.ptx.zst
  kernels/build.py --check    fails unless the product is what the sources give, and every kernel
                              assembles for every chip without spilling registers

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
from concurrent.futures import ThreadPoolExecutor

HERE = pathlib.Path(__file__).resolve().parent
PRODUCT = HERE / "kernels.ptx.zst"
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


def compile_modules():
    """The version of NVRTC, and module -> PTX."""
    nvrtc = Nvrtc()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        tasks = {name: pool.submit(nvrtc.compile, options) for name, options in modules()}
        return nvrtc.version, {name: task.result() for name, task in tasks.items()}


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


def check_resources(made):
    """Prints, for each kernel, its registers on each chip, and whether all is well."""
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(os.cpu_count()) as pool:
        tasks = {(chip, name): pool.submit(resources, chip, name, ptx, directory)
                 for chip in CHIPS for name, ptx in made.items()}
        table, problems = {}, []
        for (chip, name), task in tasks.items():
            for kernel, registers, shared, problem in task.result():
                table.setdefault((name, kernel), []).append((registers, shared))
                if problem:
                    problems.append(f"{name} {kernel} on {chip}: {registers} registers, "
                                    f"{shared} bytes shared, {problem}")
    print("module", "kernel", *CHIPS, "shared bytes")
    for (name, kernel), row in table.items():
        print(name, kernel, *[registers for registers, _ in row], max(s for _, s in row))
    print(f"{len(table)} kernels on {len(CHIPS)} chips, {len(problems)} problems")
    return problems


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    arguments = parser.parse_args()
    version, made = compile_modules()
    text = render(version, made)
    if not arguments.check:
        command = ["zstd", "-19", "--long=27", "-q", "-f", "-o", PRODUCT]
        subprocess.run(command, input=text, check=True)
        return
    problems = check_resources(made)
    unpacked = subprocess.run(["zstd", "-dcq", PRODUCT], capture_output=True, check=False)
    if unpacked.stdout != text:
        problems.append(f"{PRODUCT} is not what the sources give: run kernels/build.py")
    if problems:
        sys.exit("\n".join(["build.py:", *problems]))


if __name__ == "__main__":
    main()
