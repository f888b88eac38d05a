//! Builds the driver, and runs a test once more in a process that finds it as `libcuda.so.1`.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use library::{can_build, driver, old_driver};

#[allow(dead_code, reason = "the tests of the kernels use the rest")]
#[path = "../kernels/library.rs"]
mod library;

#[allow(unused_imports, reason = "only some programs go through all of them")]
pub(crate) use library::ELEMENTS;
pub(crate) use library::ModuleName;

/// Set in the process that has the driver.
const INSIDE: &str = "KVFS_FAKE_INSIDE";

/// Variables of the driver, as `fake_cuda.cpp` tells.
pub(crate) type Plan<'a> = &'a [(&'a str, &'a str)];

/// Copies take longer than kernels: a kernel that does not wait for its slot finds old bytes there.
pub(crate) const SLOW_COPIES: Plan<'_> = &[("KVFS_FAKE_COPY_US", "3000")];

/// Kernels take longer than copies: a copy that does not wait for a slot overwrites what is read.
pub(crate) const SLOW_KERNELS: Plan<'_> = &[("KVFS_FAKE_KERNEL_US", "3000")];

pub(crate) const F16_64: ModuleName<'_> = ("F16", "f16", 64);

/// Where the driver and some modules are, for a program that loads them; `None` without a compiler.
#[allow(dead_code, reason = "an example with this file has no such program")]
pub(crate) fn place_of_driver(modules: &[ModuleName<'_>]) -> Option<PathBuf> {
    can_build().then(|| driver(modules))
}

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
    let place = driver(modules);
    for plan in plans {
        succeed(name, Some(&place), plan);
    }
}

/// Runs `body` under a driver that lacks a function.
#[track_caller]
#[allow(dead_code, reason = "an example with this file does not ask for it")]
pub(crate) fn under_an_old_one(name: &str, body: impl FnOnce()) {
    if std::env::var_os(INSIDE).is_some() {
        body();
    } else if can_build() {
        succeed(name, Some(&old_driver()), &[]);
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
    let place = driver(modules);
    for (plan, says) in bugs {
        let (output, said) = spawn(name, Some(&place), plan);
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
    let (output, said) = spawn(name, Some(&driver(modules)), plan);
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
