//! Builds the library and programs that use it, with the compiler of the system.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

/// How a program gets the library.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Link {
    /// `libkvfs.so`
    Shared,
    /// `libkvfs.a`
    Static,
}

const C: &[&str] = &["cc", "-std=c11", "-O1", "-Wall", "-Wextra", "-Werror", "-pedantic"];
const CPP: &[&str] = &["c++", "-std=c++11", "-Wall", "-Wextra", "-Werror", "-pedantic"];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

#[track_caller]
pub(crate) fn run(command: &mut Command) -> Output {
    let output = command.output().unwrap();
    let [stdout, stderr] =
        [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    assert!(output.status.success(), "{command:?}: {}\n{stdout}{stderr}", output.status);
    output
}

/// The files that `build-c-library.sh` makes, in the profile of what uses them.
fn libraries() -> &'static [PathBuf] {
    static LIBRARIES: OnceLock<Vec<PathBuf>> = OnceLock::new();
    LIBRARIES.get_or_init(|| {
        let mut build = Command::new(root().join("mount-scripts/build-c-library.sh"));
        if !cfg!(debug_assertions) {
            build.arg("--release");
        }
        let output = run(build.arg("--quiet").env("CARGO_TERM_COLOR", "never"));
        let paths = String::from_utf8(output.stdout).unwrap();
        paths.lines().map(PathBuf::from).collect()
    })
}

pub(crate) fn library(link: Link) -> &'static Path {
    let extension = if link == Link::Shared { "so" } else { "a" };
    let found = libraries().iter().find(|path| path.extension().is_some_and(|e| e == extension));
    found.expect("the script builds both libraries")
}

/// Compiles and links a source file of the repository, `.c` or `.cpp`.
pub(crate) fn build(source: &str, link: Link, directory: &Path) -> PathBuf {
    let program = directory.join(format!("{}-{link:?}", source.replace('/', "-")));
    let is_c = Path::new(source).extension().is_some_and(|extension| extension == "c");
    let compiler = if is_c { C } else { CPP };
    let mut command = Command::new(compiler[0]);
    command.args(&compiler[1..]).arg("-I").arg(root().join("include")).arg(root().join(source));
    command.arg("-o").arg(&program);
    let library = library(link);
    match link {
        Link::Shared => {
            let directory = library.parent().unwrap();
            command.arg("-L").arg(directory).arg("-lkvfs");
            command.arg(format!("-Wl,-rpath,{}", directory.display()));
        }
        Link::Static => {
            command.arg(library);
        }
    }
    run(command.args(["-lpthread", "-ldl", "-lm"]));
    program
}
