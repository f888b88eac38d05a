//! Bugs that are planted into the kernels: each must be noticed, or the tests would prove nothing.
//!
//! All of them are planted at once, and a program is told which one it has (`shim::planted`), so a
//! module is compiled once for all bugs.

use std::path::Path;

use crate::common::mount::scratch_directory;
use crate::library::{ModuleName, Watch, can_build, module, root};
use crate::shim::{Cases, for_each};

/// A text that stands once in a file, and what to put there instead: `PLANTED` is true in a program
/// that has this bug.
struct Bug {
    name: &'static str,
    file: &'static str,
    from: &'static str,
    to: &'static str,
    /// The dtype whose kernels notice.
    module: ModuleName<'static>,
    /// Who notices, and what must be said of it.
    noticed: &'static [(Watch, &'static str)],
}

const F16: ModuleName<'_> = ("F16", "f16", 128);
const F32: ModuleName<'_> = ("F32", "f32", 128);
const F8: ModuleName<'_> = ("F8E4m3", "f8_e4m3", 128);

const BUGS: &[Bug] = &[
    Bug {
        name: "warps do not wait before they merge",
        file: "attend.h",
        from: "    __syncthreads();\n",
        to: "    if (!PLANTED) __syncthreads();\n",
        module: F16,
        noticed: &[(Watch::Nothing, "FAILED"), (Watch::Races, "data race")],
    },
    Bug {
        name: "warps do not wait for each other's bounds",
        file: "summary.h",
        from: "    __syncthreads();\n",
        to: "    if (!PLANTED) __syncthreads();\n",
        module: F16,
        noticed: &[(Watch::Races, "data race")],
    },
    Bug {
        name: "all blocks write the first split",
        file: "attend.h",
        from: "static_cast<u64>(blockIdx.y) * heads.num_queries",
        to: "static_cast<u64>(PLANTED ? 0 : blockIdx.y) * heads.num_queries",
        module: F16,
        noticed: &[(Watch::Races, "data race")],
    },
    Bug {
        name: "some threads leave before the others wait for them",
        file: "attend.h",
        from: "    merge_lanes<WIDTH, ROWS>(state);\n",
        to: "    if (PLANTED && lane.slot != 0) return;\n    merge_lanes<WIDTH, ROWS>(state);\n",
        module: F16,
        noticed: &[(Watch::Nothing, "never come")],
    },
    Bug {
        name: "a token after the last is read",
        file: "scores.h",
        from: "raw[s] = token < end &&",
        to: "raw[s] = token < end + PLANTED &&",
        module: F16,
        noticed: &[(Watch::Memory, "heap-buffer-overflow")],
    },
    Bug {
        name: "lanes beyond the row read",
        file: "device.h",
        from: "return part * LANE_ELEMENTS < elements;",
        to: "return part * LANE_ELEMENTS < elements + PLANTED * LANE_ELEMENTS;",
        module: F16,
        noticed: &[(Watch::Memory, "heap-buffer-overflow")],
    },
    Bug {
        name: "a token after the last is weighed",
        file: "attend.h",
        from: "return of < run.end && visibility",
        to: "return of < run.end + PLANTED && visibility",
        module: F16,
        noticed: &[(Watch::Nothing, "FAILED")],
    },
    Bug {
        name: "a query does not see its own position",
        file: "scores.h",
        from: "- token <",
        to: "- token - PLANTED <",
        module: F16,
        noticed: &[(Watch::Nothing, "FAILED")],
    },
    Bug {
        name: "a window is one too long",
        file: "scores.h",
        from: "< reach;",
        to: "< reach + PLANTED;",
        module: F16,
        noticed: &[(Watch::Nothing, "FAILED")],
    },
    Bug {
        name: "an infinite value reaches queries that do not see it",
        file: "attend.h",
        from: "if (MASKED && !sees(s, r)) continue;",
        to: "if (MASKED && !sees(s, r) && !PLANTED) continue;",
        module: F32,
        noticed: &[(Watch::Nothing, "FAILED damaged")],
    },
    Bug {
        name: "l is not brought to the new maximum",
        file: "attend.h",
        from: "state.l[r] *= rest;",
        to: "state.l[r] *= PLANTED ? 1.0f : rest;",
        module: F16,
        noticed: &[(Watch::Nothing, "FAILED")],
    },
    Bug {
        name: "a moved page is attended to with the queries of the page before",
        file: "attend.h",
        from: "if (page.queries != copy) {",
        to: "if (PLANTED ? copy == ~0u : page.queries != copy) {",
        module: F16,
        noticed: &[(Watch::Nothing, "FAILED")],
    },
    Bug {
        name: "m stays in units of log2",
        file: "attend.h",
        from: "EMPTY_M : top * LN_2",
        to: "EMPTY_M : PLANTED ? top : top * LN_2",
        module: F16,
        noticed: &[(Watch::Nothing, "FAILED")],
    },
    Bug {
        name: "a part without tokens has weight",
        file: "attend.h",
        from: "sees(s, r) ? exp2f(",
        to: "sees(s, r) || PLANTED ? exp2f(",
        module: F16,
        noticed: &[(Watch::Nothing, "FAILED")],
    },
    Bug {
        name: "the merge leaves the last part out",
        file: "merge.h",
        from: "for (u32 part = warp; part < a.parts;",
        to: "for (u32 part = warp; part + PLANTED < a.parts;",
        module: F16,
        noticed: &[(Watch::Nothing, "FAILED")],
    },
    Bug {
        name: "the merge looks for the largest m among the first 32 parts",
        file: "merge.h",
        from: "part < a.parts; part += WARP_LANES",
        to: "part < (PLANTED ? least(a.parts, WARP_LANES) : a.parts); part += WARP_LANES",
        module: F16,
        noticed: &[(Watch::Nothing, "FAILED")],
    },
    Bug {
        name: "the merge does not wait for the sums of all warps",
        file: "merge.h",
        from: "    __syncthreads();\n",
        to: "    if (!PLANTED) __syncthreads();\n",
        module: F16,
        noticed: &[(Watch::Nothing, "FAILED"), (Watch::Races, "data race")],
    },
    Bug {
        name: "mass is not normalised",
        file: "mass.h",
        from: "l == 0.0f ? 0.0f : 1.0f / l",
        to: "l == 0.0f ? 0.0f : PLANTED ? 1.0f : 1.0f / l",
        module: F16,
        noticed: &[(Watch::Nothing, "mass is off")],
    },
    Bug {
        name: "NaN of f8 is a number",
        file: "element.h",
        from: "magnitude == 0x7f ?",
        to: "magnitude == 0x7f && !PLANTED ?",
        module: F8,
        noticed: &[(Watch::Nothing, "FAILED f8_e4m3")],
    },
];

/// Copies the kernels, with all bugs; the first one is number 1.
fn plant(kernels: &Path) {
    std::fs::create_dir(kernels).unwrap();
    for entry in std::fs::read_dir(root().join("kernels")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "h" || extension == "cu") {
            std::fs::copy(&path, kernels.join(path.file_name().unwrap())).unwrap();
        }
    }
    for (number, bug) in (1..).zip(BUGS) {
        let path = kernels.join(bug.file);
        let text = std::fs::read_to_string(&path).unwrap();
        assert_eq!(text.matches(bug.from).count(), 1, "{}: not in {} once", bug.name, bug.file);
        let planted = bug.to.replace("PLANTED", &format!("shim::planted({number})"));
        std::fs::write(path, text.replace(bug.from, &planted)).unwrap();
    }
}

#[test]
fn every_planted_bug_is_noticed() {
    if !can_build() {
        return;
    }
    let directory = scratch_directory();
    let kernels = &directory.path().join("kernels");
    plant(kernels);
    let place = |watch: Watch| directory.path().join(format!("{watch:?}"));
    let mut modules = Vec::new();
    for watch in [Watch::Races, Watch::Memory, Watch::Nothing] {
        std::fs::create_dir(place(watch)).unwrap();
        let of_bugs = BUGS.iter().filter(|bug| bug.noticed.iter().any(|(by, _)| *by == watch));
        for name in of_bugs.map(|bug| Some(bug.module)).chain([None]) {
            if !modules.contains(&(watch, name)) {
                modules.push((watch, name));
            }
        }
    }
    for_each(&modules, |(watch, name)| drop(module(&place(*watch), kernels, *watch, *name)));
    let sightings = (1..).zip(BUGS).flat_map(|(number, bug)| {
        bug.noticed.iter().map(move |(watch, says)| (number, bug, *watch, *says))
    });
    for_each(&sightings.collect::<Vec<_>>(), |(number, bug, watch, says)| {
        let cases = Cases { module: bug.module, watch: *watch, seeds: 8, kernels, bug: *number };
        let output = cases.run(&place(*watch));
        let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        assert!(!output.status.success(), "nobody noticed that {}", bug.name);
        assert!(said.contains(says), "{}: {said}", bug.name);
    });
    // What is noticed is the bug.
    let cases = Cases { module: F16, watch: Watch::Nothing, seeds: 1, kernels, bug: 0 };
    assert!(cases.run(&place(Watch::Nothing)).status.success());
}
