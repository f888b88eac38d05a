//! Every variant of every kernel gives what f64 gives, and does nothing else.

use crate::common::mount::scratch_directory;
use crate::shim::{Cases, Watch, can_build, for_each, root};

const ELEMENTS: [&str; 6] = ["F16", "Bf16", "F32", "F8E4m3", "Q8_0", "Q4_0"];
const WIDTHS: [u32; 3] = [64, 128, 256];

fn check(modules: &[(&str, u32)], watch: Watch, seeds: u32) {
    if !can_build() {
        return;
    }
    let directory = scratch_directory();
    for_each(modules, |&(element, width)| {
        let kernels = &root().join("kernels");
        let output = Cases { element, width, watch, seeds, kernels }.run(directory.path());
        let [stdout, stderr] =
            [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text).into_owned());
        assert!(output.status.success(), "{element} {width}: {}\n{stdout}{stderr}", output.status);
        // Five numbers of rows, and the masked one.
        assert_eq!(stdout.lines().count(), 6, "{stdout}");
    });
}

#[test]
fn every_variant_is_exact() {
    let modules = ELEMENTS.iter().flat_map(|element| WIDTHS.map(|width| (*element, width)));
    check(&modules.collect::<Vec<_>>(), Watch::Nothing, 12);
}

/// What is read depends on the dtype and on the width, but not on both at once.
#[test]
fn every_access_is_within_bounds() {
    let mut modules = ELEMENTS.map(|element| (element, 128)).to_vec();
    modules.extend([("F16", 64), ("F16", 256)]);
    check(&modules, Watch::Memory, 3);
}

/// The dtypes differ in what a thread does by itself.
#[test]
fn threads_do_not_race() {
    check(&WIDTHS.map(|width| ("F16", width)), Watch::Races, 2);
}
