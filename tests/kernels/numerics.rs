//! Every variant of every kernel gives what f64 gives, and does nothing else.

use crate::library::{ELEMENTS, ModuleName, Watch, can_build, directory, module, program, root};
use crate::shim::{Cases, for_each};

const WIDTHS: [u32; 3] = [64, 128, 256];

fn check(modules: &[ModuleName<'_>], watch: Watch, seeds: u32) {
    if !can_build() {
        return;
    }
    let kernels = &root().join("kernels");
    let directory = directory(watch);
    // What all of them want.
    for_each(&[true, false], |is_program| {
        if *is_program {
            program("cases", watch);
        } else {
            module(&directory, kernels, watch, None);
        }
    });
    for_each(modules, |name| {
        let output = Cases { module: *name, watch, seeds, kernels, bug: 0 }.run(&directory);
        let [stdout, stderr] =
            [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text).into_owned());
        assert!(output.status.success(), "{name:?}: {}\n{stdout}{stderr}", output.status);
        // Five numbers of rows, and the masked one.
        assert_eq!(stdout.lines().count(), 6, "{stdout}");
    });
}

#[test]
fn every_variant_is_exact() {
    let modules =
        ELEMENTS.iter().flat_map(|(element, dtype)| WIDTHS.map(|width| (*element, *dtype, width)));
    check(&modules.collect::<Vec<_>>(), Watch::Nothing, 12);
}

/// What is read depends on the dtype and on the width, but not on both at once.
#[test]
fn every_access_is_within_bounds() {
    let mut modules = ELEMENTS.map(|(element, dtype)| (element, dtype, 128)).to_vec();
    modules.extend([("F16", "f16", 64), ("F16", "f16", 256)]);
    check(&modules, Watch::Memory, 3);
}

/// The dtypes differ in what a thread does by itself.
#[test]
fn threads_do_not_race() {
    check(&WIDTHS.map(|width| ("F16", "f16", width)), Watch::Races, 2);
}
