//! Builds the kernels as C++, as they are or with a change, and runs them.

use std::path::Path;
use std::process::{Command, Output};
use std::sync::Mutex;
use std::thread::scope;

use crate::common::available;

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
    /// Without optimisation where compiling would take longer than running.
    fn flags(self) -> &'static [&'static str] {
        match self {
            Self::Nothing => &["-O1"],
            Self::Memory => {
                &["-O0", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
            }
            Self::Races => &["-O1", "-g", "-fsanitize=thread"],
        }
    }
}

/// The directory with `kernels` and `tests`.
pub(crate) fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Whether the shim can be built here.
pub(crate) fn can_build() -> bool {
    if !cfg!(target_arch = "x86_64") {
        eprintln!("skipped: the shim is for x86-64");
        return false;
    }
    available("c++")
}

/// A run of all kernels of one module.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cases<'a> {
    /// The name in `kernels/element.h`.
    pub(crate) element: &'a str,
    /// Elements of the longest row.
    pub(crate) width: u32,
    pub(crate) watch: Watch,
    /// Settings of each variant.
    pub(crate) seeds: u32,
    /// Where the kernels are.
    pub(crate) kernels: &'a Path,
}

impl Cases<'_> {
    /// # Panics
    /// If it does not compile.
    #[track_caller]
    pub(crate) fn run(&self, directory: &Path) -> Output {
        let program = directory.join(format!("{}-{}", self.element, self.width));
        let module = (self.element, self.width);
        build("cases.cpp", module, self.kernels, self.watch.flags(), &program);
        let mut cases = Command::new(program);
        cases.env("TSAN_OPTIONS", "halt_on_error=1").arg(self.seeds.to_string()).output().unwrap()
    }
}

/// Compiles a program of this directory with the kernels of a module, an element and a width.
///
/// # Panics
/// If that fails.
#[track_caller]
pub(crate) fn build(
    source: &str, module: (&str, u32), kernels: &Path, flags: &[&str], program: &Path,
) {
    let tests = root().join("tests/kernels");
    let mut compiler = Command::new("c++");
    // Pragmas unroll loops for the sake of registers.
    compiler.args(["-std=c++17", "-march=native", "-Wall", "-Wextra", "-Werror"]);
    compiler.args(["-Wno-unknown-pragmas", "-DKVFS_SHIM"]).args(flags);
    compiler.arg(format!("-DKVFS_ELEMENT={}", module.0)).arg(format!("-DKVFS_WIDTH={}", module.1));
    compiler.arg("-I").arg(&tests).arg("-I").arg(kernels);
    let output = compiler.arg(tests.join(source)).arg("-o").arg(program).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Does something for each item, as many at a time as there are cores.
pub(crate) fn for_each<T: Sync>(items: &[T], act: impl Fn(&T) + Sync) {
    let workers = std::thread::available_parallelism().map_or(1, usize::from).min(items.len());
    let left = Mutex::new(items.iter());
    scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                loop {
                    let next = left.lock().unwrap().next();
                    let Some(item) = next else { return };
                    act(item);
                }
            });
        }
    });
}
