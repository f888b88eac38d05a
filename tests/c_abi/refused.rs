//! What the library refuses, and what it shows.

use std::process::Command;

use crate::common::mount::scratch_directory;
use crate::program::{Link, build, library, run};

/// Each wrong call has its status and a text that names what is wrong; sizes of older and newer
/// programs, a fork.
#[test]
fn wrong_calls() {
    require!(cc);
    let directory = scratch_directory();
    for link in [Link::Shared, Link::Static] {
        run(&mut Command::new(build("tests/c_abi/refused.c", link, directory.path())));
    }
}

#[test]
fn cpp() {
    require!(cc);
    // `c++` cannot be named as a word of the macro.
    if !crate::common::available("c++") {
        return;
    }
    let directory = scratch_directory();
    run(&mut Command::new(build("tests/c_abi/header.cpp", Link::Shared, directory.path())));
}

/// Names of dependencies stay inside, so that they cannot meet those of a program.
#[test]
fn only_its_own_names_are_visible() {
    require!(cc, nm);
    let mut nm = Command::new("nm");
    let output = run(nm.args(["--dynamic", "--defined-only"]).arg(library(Link::Shared)));
    let symbols = String::from_utf8(output.stdout).unwrap();
    let names: Vec<&str> =
        symbols.lines().filter_map(|line| line.split_whitespace().nth(2)).collect();
    assert!(names.contains(&"kvfs_attention_run"), "{names:?}");
    // An engine that loads the library as a backend looks for these two.
    let own = |name: &str| {
        name.starts_with("kvfs_") || ["ggml_backend_init", "ggml_backend_score"].contains(&name)
    };
    let foreign: Vec<_> = names.iter().filter(|name| !own(name)).collect();
    assert!(foreign.is_empty(), "{foreign:?}");
}
