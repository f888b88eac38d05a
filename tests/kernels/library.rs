//! The kernels as C++ libraries (`module.cpp`), and the programs that load them: built once for all
//! tests that want the same.

use std::path::{Path, PathBuf};
use std::process::Command;

use sha2::{Digest, Sha256};

use crate::skips;

/// Element types, as the sources and as kvfs call them.
pub(crate) const ELEMENTS: [(&str, &str); 6] = [
    ("F16", "f16"),
    ("Bf16", "bf16"),
    ("F32", "f32"),
    ("F8E4m3", "f8_e4m3"),
    ("Q8_0", "q8_0"),
    ("Q4_0", "q4_0"),
];

/// What watches the kernels.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Watch {
    /// Only the results count.
    Nothing,
    /// Addresses, and undefined behaviour.
    Memory,
    /// Races between threads and between blocks.
    Races,
}

impl Watch {
    fn name(self) -> &'static str {
        match self {
            Self::Nothing => "plain",
            Self::Memory => "memory",
            Self::Races => "races",
        }
    }

    /// Without optimisation where compiling would take longer than running.
    fn flags(self) -> &'static [&'static str] {
        match self {
            Self::Nothing => &["-O1"],
            Self::Memory => &["-O0", "-g1", "-fno-sanitize-recover=all"],
            Self::Races => &["-O1", "-g1"],
        }
    }

    fn sanitizers(self) -> &'static [&'static str] {
        match self {
            Self::Nothing => &[],
            Self::Memory => &["-fsanitize=address,undefined"],
            Self::Races => &["-fsanitize=thread"],
        }
    }
}

/// A module of the kernels: the names in `kernels/element.h` and of the dtype, and the width.
pub(crate) type ModuleName<'a> = (&'a str, &'a str, u32);

/// The directory with `kernels` and `tests`.
pub(crate) fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Whether the shim can be built here.
pub(crate) fn can_build() -> bool {
    let other = || "the shim is for x86-64".to_owned();
    let compiler = Command::new("c++").arg("--version").output();
    let missing = compiler.err().map(|error| format!("no c++: {error}"));
    skips::is_there("x86_64", (!cfg!(target_arch = "x86_64")).then(other))
        && skips::is_there("c++", missing)
}

/// Where libraries of these sources are, for this and other tests.
pub(crate) fn directory(watch: Watch) -> PathBuf {
    // Only tests in `tests/` are told where their files go.
    let place =
        option_env!("CARGO_TARGET_TMPDIR").map_or_else(|| root().join("target/tmp"), PathBuf::from);
    let directory = place.join(format!("kernels-{}-{}", sources(), watch.name()));
    std::fs::create_dir_all(&directory).unwrap();
    directory
}

/// What tells one state of the sources from another.
fn sources() -> String {
    let mut digest = Sha256::new();
    for directory in ["kernels", "tests/kernels", "tests/cuda"] {
        let entries = std::fs::read_dir(root().join(directory)).unwrap();
        let mut paths: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
        paths.sort();
        for path in paths {
            let extension = path.extension().and_then(|extension| extension.to_str());
            if matches!(extension, Some("h" | "cu" | "cpp")) {
                digest.update(std::fs::read(path).unwrap());
            }
        }
    }
    let hash = digest.finalize();
    hash.iter().take(8).fold(String::new(), |text, byte| text + &format!("{byte:02x}"))
}

/// The library of a module, or of the kernels that all share; `kernels` is where their sources are.
pub(crate) fn module(
    directory: &Path, kernels: &Path, watch: Watch, name: Option<ModuleName<'_>>,
) -> PathBuf {
    let (defined, product) = match name {
        Some((element, dtype, width)) => (
            vec![format!("-DKVFS_ELEMENT={element}"), format!("-DKVFS_WIDTH={width}")],
            format!("{dtype}_{width}.so"),
        ),
        None => (Vec::new(), "common.so".to_owned()),
    };
    let mut flags: Vec<&str> = defined.iter().map(String::as_str).collect();
    flags.extend(watch.flags());
    flags.extend(watch.sanitizers());
    shared_library(directory, &root().join("tests/kernels/module.cpp"), kernels, &product, &flags)
}

/// The directory with a driver that has no GPU (`libcuda.so.1`) and modules for it.
#[allow(dead_code, reason = "the tests of the kernels need no driver")]
pub(crate) fn driver(modules: &[ModuleName<'_>]) -> PathBuf {
    let (directory, kernels) = (directory(Watch::Nothing), root().join("kernels"));
    let source = root().join("tests/cuda/fake_cuda.cpp");
    shared_library(&directory, &source, &kernels, "libcuda.so.1", &["-O1"]);
    for name in [None].into_iter().chain(modules.iter().copied().map(Some)) {
        module(&directory, &kernels, Watch::Nothing, name);
    }
    directory
}

/// The directory with a driver that lacks a function.
#[allow(dead_code, reason = "as above")]
pub(crate) fn old_driver() -> PathBuf {
    let directory = directory(Watch::Nothing).join("old");
    std::fs::create_dir_all(&directory).unwrap();
    let source = root().join("tests/cuda/fake_cuda.cpp");
    let flags = ["-O1", "-DKVFS_FAKE_OLD"];
    shared_library(&directory, &source, &root().join("kernels"), "libcuda.so.1", &flags);
    directory
}

/// A library of one source file.
fn shared_library(
    directory: &Path, source: &Path, kernels: &Path, product: &str, flags: &[&str],
) -> PathBuf {
    // Modules have the same names in them: each must find its own.
    let shared = ["-fvisibility=hidden", "-fno-gnu-unique", "-Wl,-Bsymbolic", "-shared", "-fPIC"];
    let sources = [source.as_os_str()];
    compile(directory, product, &sources, kernels, &[&shared, flags].concat())
}

/// A program of this directory. It is compiled once and without sanitizers: what is watched are the
/// kernels, in their libraries.
pub(crate) fn program(name: &str, watch: Watch) -> PathBuf {
    let kernels = root().join("kernels");
    let source = root().join("tests/kernels").join(format!("{name}.cpp"));
    let plain = directory(Watch::Nothing);
    let object =
        compile(&plain, &format!("{name}.o"), &[source.as_os_str()], &kernels, &["-O1", "-c"]);
    compile(&directory(watch), name, &[object.as_os_str()], &kernels, watch.sanitizers())
}

fn compile(
    directory: &Path, product: &str, sources: &[&std::ffi::OsStr], kernels: &Path, flags: &[&str],
) -> PathBuf {
    let path = directory.join(product);
    if path.exists() {
        return path;
    }
    let made = tempfile::Builder::new().permissions(executable()).tempfile_in(directory).unwrap();
    let mut compiler = Command::new("c++");
    // Pragmas unroll loops for the sake of registers.
    compiler.args(["-std=c++17", "-march=native", "-Wall", "-Wextra", "-Werror"]);
    compiler.args(["-Wno-unknown-pragmas", "-DKVFS_SHIM"]).args(flags);
    compiler.arg("-I").arg(root().join("tests/kernels")).arg("-I").arg(kernels);
    compiler.args(sources).args(["-ldl", "-pthread", "-o"]).arg(made.path());
    let output = compiler.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    // Programs cannot be run while somebody has them open for writing.
    made.into_temp_path().persist(&path).unwrap();
    path
}

fn executable() -> std::fs::Permissions {
    std::os::unix::fs::PermissionsExt::from_mode(0o755)
}
