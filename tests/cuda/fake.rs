//! Builds the driver, and runs a test once more in a process that finds it as `libcuda.so.1`.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use sha2::{Digest, Sha256};

/// Set in the process that has the driver.
const INSIDE: &str = "KVFS_FAKE_INSIDE";

/// Variables of the driver, as `fake_cuda.cpp` tells.
pub(crate) type Plan<'a> = &'a [(&'a str, &'a str)];

/// Copies take longer than kernels: a kernel that does not wait for its slot finds old bytes there.
pub(crate) const SLOW_COPIES: Plan<'_> = &[("KVFS_FAKE_COPY_US", "3000")];

/// Kernels take longer than copies: a copy that does not wait for a slot overwrites what is read.
pub(crate) const SLOW_KERNELS: Plan<'_> = &[("KVFS_FAKE_KERNEL_US", "3000")];

/// A module of the kernels: the names in `kernels/element.h` and of the dtype, and the width.
pub(crate) type ModuleName<'a> = (&'a str, &'a str, u32);

pub(crate) const F16_64: ModuleName<'_> = ("F16", "f16", 64);

/// Runs `body` under the driver, once for each plan. `name` is `concat!(module_path!(), "::", TEST)`.
#[track_caller]
pub(crate) fn under(
    name: &str, modules: &[ModuleName<'_>], plans: &[Plan<'_>], body: impl FnOnce(),
) {
    if std::env::var_os(INSIDE).is_some() {
        body();
        return;
    }
    if !can_build() {
        return;
    }
    let driver = build(modules);
    for plan in plans {
        succeed(name, Some(&driver), plan);
    }
}

/// Runs `body`, which must fail with what is said, under drivers that do not do all they are asked
/// to: as the program would be if it did not ask.
#[track_caller]
pub(crate) fn noticed(
    name: &str, modules: &[ModuleName<'_>], bugs: &[(Plan<'_>, &str)], body: impl FnOnce(),
) {
    if std::env::var_os(INSIDE).is_some() {
        body();
        return;
    }
    if !can_build() {
        return;
    }
    let driver = build(modules);
    for (plan, says) in bugs {
        let (output, said) = spawn(name, Some(&driver), plan);
        assert!(!output.status.success(), "nobody noticed {plan:?}:\n{said}");
        assert!(said.contains(says), "{plan:?} was noticed otherwise:\n{said}");
    }
}

/// Runs `body`, which prints one number, under the driver; the number, or `None` without a compiler.
#[track_caller]
#[allow(clippy::print_stdout, reason = "it is how the other process hears of it")]
pub(crate) fn measured(
    name: &str, modules: &[ModuleName<'_>], plan: Plan<'_>, body: impl FnOnce() -> u128,
) -> Option<f64> {
    if std::env::var_os(INSIDE).is_some() {
        println!("measured {}", body());
        return None;
    }
    if !can_build() {
        return None;
    }
    let (output, said) = spawn(name, Some(&build(modules)), plan);
    assert!(output.status.success(), "{said}");
    let number = said.lines().find_map(|line| line.split_once("measured ")?.1.parse().ok());
    Some(number.unwrap_or_else(|| panic!("no number: {said}")))
}

/// Runs `body` in a process of its own, without the driver.
#[track_caller]
pub(crate) fn without(name: &str, body: impl FnOnce()) {
    if std::env::var_os(INSIDE).is_some() {
        body();
    } else {
        succeed(name, None, &[]);
    }
}

fn can_build() -> bool {
    if !cfg!(target_arch = "x86_64") {
        eprintln!("skipped: the shim is for x86-64");
        return false;
    }
    let has_compiler = Command::new("c++").arg("--version").output().is_ok();
    if !has_compiler {
        let required = std::env::var("KVFS_REQUIRE").unwrap_or_default();
        assert!(!required.contains("c++"), "KVFS_REQUIRE has c++, but there is none");
        eprintln!("skipped: no c++");
    }
    has_compiler
}

#[track_caller]
fn succeed(name: &str, driver: Option<&Path>, plan: Plan<'_>) {
    let (output, said) = spawn(name, driver, plan);
    assert!(output.status.success(), "{name} under {plan:?}: {}\n{said}", output.status);
    assert!(said.contains("1 passed"), "{name} did not run:\n{said}");
}

/// Runs this very test in another process.
fn spawn(name: &str, driver: Option<&Path>, plan: Plan<'_>) -> (Output, String) {
    let (_, test) = name.split_once("::").unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args([test, "--exact", "--nocapture"]).env(INSIDE, "1").envs(plan.iter().copied());
    if let Some(driver) = driver {
        let mut path = OsString::from(driver);
        if let Some(rest) = std::env::var_os("LD_LIBRARY_PATH") {
            path.push(":");
            path.push(rest);
        }
        child.env("LD_LIBRARY_PATH", path).env("KVFS_FAKE_MODULES", driver);
    }
    let output = child.output().unwrap();
    let said = String::from_utf8_lossy(&[&output.stdout[..], &output.stderr].concat()).into_owned();
    (output, said)
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The directory with the driver and the modules, which other tests may have built.
fn build(modules: &[ModuleName<'_>]) -> PathBuf {
    // Only tests in `tests/` are told where their files go.
    let place =
        option_env!("CARGO_TARGET_TMPDIR").map_or_else(|| root().join("target/tmp"), PathBuf::from);
    let directory = place.join(format!("cuda-{}", sources()));
    std::fs::create_dir_all(&directory).unwrap();
    compile(&directory, "fake_cuda.cpp", "libcuda.so.1", &["-ldl", "-pthread"]);
    compile(&directory, "module.cpp", "common.so", &[]);
    for (element, dtype, width) in modules {
        let defined = [format!("-DKVFS_ELEMENT={element}"), format!("-DKVFS_WIDTH={width}")];
        let defined = defined.each_ref().map(String::as_str);
        compile(&directory, "module.cpp", &format!("{dtype}_{width}.so"), &defined);
    }
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

fn compile(directory: &Path, source: &str, product: &str, flags: &[&str]) {
    let path = directory.join(product);
    if path.exists() {
        return;
    }
    let made = tempfile::NamedTempFile::new_in(directory).unwrap();
    let mut compiler = Command::new("c++");
    compiler.args(["-std=c++17", "-march=native", "-O1", "-Wall", "-Wextra", "-Werror"]);
    // Modules have the same names in them: each must find its own.
    compiler.args(["-Wno-unknown-pragmas", "-DKVFS_SHIM", "-fvisibility=hidden"]);
    compiler.args(["-fno-gnu-unique", "-Wl,-Bsymbolic", "-shared", "-fPIC"]);
    compiler.arg("-I").arg(root().join("tests/kernels")).arg("-I").arg(root().join("kernels"));
    compiler.arg(root().join("tests/cuda").join(source)).arg("-o").arg(made.path());
    let output = compiler.args(flags).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    made.persist(path).unwrap();
}
