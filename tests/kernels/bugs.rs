//! Bugs that are planted into the kernels: each must be noticed, or the tests would prove nothing.

use std::path::Path;

use crate::common::mount::scratch_directory;
use crate::shim::{Cases, Watch, can_build, for_each, root};

/// A text that stands once in a file, and what to put there instead.
struct Bug {
    name: &'static str,
    file: &'static str,
    from: &'static str,
    to: &'static str,
    /// The dtype whose kernels notice.
    element: &'static str,
    watch: Watch,
    /// What must be said of it.
    noticed: &'static str,
}

const BUGS: &[Bug] = &[
    Bug {
        name: "warps do not wait before they merge",
        file: "attend.h",
        from: "    __syncthreads();\n",
        to: "",
        element: "F16",
        watch: Watch::Nothing,
        noticed: "FAILED",
    },
    Bug {
        name: "the same, whatever the order of threads",
        file: "attend.h",
        from: "    __syncthreads();\n",
        to: "",
        element: "F16",
        watch: Watch::Races,
        noticed: "data race",
    },
    Bug {
        name: "warps do not wait for each other's bounds",
        file: "summary.h",
        from: "    __syncthreads();\n",
        to: "",
        element: "F16",
        watch: Watch::Races,
        noticed: "data race",
    },
    Bug {
        name: "all blocks write the first split",
        file: "attend.h",
        from: "static_cast<u64>(blockIdx.y) * heads.num_queries",
        to: "static_cast<u64>(0) * heads.num_queries",
        element: "F16",
        watch: Watch::Races,
        noticed: "data race",
    },
    Bug {
        name: "some threads leave before the others wait for them",
        file: "attend.h",
        from: "    merge_lanes<WIDTH, ROWS>(state);\n",
        to: "    if (lane.slot != 0) return;\n    merge_lanes<WIDTH, ROWS>(state);\n",
        element: "F16",
        watch: Watch::Nothing,
        noticed: "never come",
    },
    Bug {
        name: "a token after the last is read",
        file: "scores.h",
        from: "raw[s] = token < end &&",
        to: "raw[s] = token <= end &&",
        element: "F16",
        watch: Watch::Memory,
        noticed: "heap-buffer-overflow",
    },
    Bug {
        name: "lanes beyond the row read",
        file: "device.h",
        from: "return part * LANE_ELEMENTS < elements;",
        to: "return part * LANE_ELEMENTS < elements + LANE_ELEMENTS;",
        element: "F16",
        watch: Watch::Memory,
        noticed: "heap-buffer-overflow",
    },
    Bug {
        name: "a token after the last is weighed",
        file: "attend.h",
        from: "return of < run.end && visibility",
        to: "return of <= run.end && visibility",
        element: "F16",
        watch: Watch::Nothing,
        noticed: "FAILED",
    },
    Bug {
        name: "a query does not see its own position",
        file: "scores.h",
        from: "- token < reach;",
        to: "- token - 1 < reach;",
        element: "F16",
        watch: Watch::Nothing,
        noticed: "FAILED",
    },
    Bug {
        name: "a window is one too long",
        file: "scores.h",
        from: "- token < reach;",
        to: "- token <= reach;",
        element: "F16",
        watch: Watch::Nothing,
        noticed: "FAILED",
    },
    Bug {
        name: "an infinite value reaches queries that do not see it",
        file: "attend.h",
        from: "if (MASKED && !sees(s, r)) continue;",
        to: "",
        element: "F32",
        watch: Watch::Nothing,
        noticed: "FAILED damaged",
    },
    Bug {
        name: "l is not brought to the new maximum",
        file: "attend.h",
        from: "        state.l[r] *= rest;\n",
        to: "",
        element: "F16",
        watch: Watch::Nothing,
        noticed: "FAILED",
    },
    Bug {
        name: "a moved page is attended to with the queries of the page before",
        file: "attend.h",
        from: "if (page.queries != copy) {",
        to: "if (copy == ~0u) {",
        element: "F16",
        watch: Watch::Nothing,
        noticed: "FAILED",
    },
    Bug {
        name: "m stays in units of log2",
        file: "attend.h",
        from: "top == EMPTY_M ? EMPTY_M : top * LN_2",
        to: "top",
        element: "F16",
        watch: Watch::Nothing,
        noticed: "FAILED",
    },
    Bug {
        name: "a part without tokens has weight",
        file: "attend.h",
        from: "sees(s, r) ? exp2f(scores[s][r] - top) : 0.0f",
        to: "exp2f(scores[s][r] - top)",
        element: "F16",
        watch: Watch::Nothing,
        noticed: "FAILED",
    },
    Bug {
        name: "the merge leaves the last part out",
        file: "merge.h",
        from: "    float sum = 0.0f;\n    for (u32 part = 0; part < a.parts;",
        to: "    float sum = 0.0f;\n    for (u32 part = 0; part + 1 < a.parts;",
        element: "F16",
        watch: Watch::Nothing,
        noticed: "FAILED",
    },
    Bug {
        name: "mass is not normalised",
        file: "mass.h",
        from: "l == 0.0f ? 0.0f : 1.0f / l",
        to: "l == 0.0f ? 0.0f : 1.0f",
        element: "F16",
        watch: Watch::Nothing,
        noticed: "mass is off",
    },
    Bug {
        name: "NaN of f8 is a number",
        file: "element.h",
        from: "magnitude == 0x7f ? 0x7fc00000u : magnitude << 20",
        to: "magnitude << 20",
        element: "F8E4m3",
        watch: Watch::Nothing,
        noticed: "FAILED f8_e4m3",
    },
];

/// Copies the kernels, with a bug.
fn plant(bug: &Bug, kernels: &Path) {
    std::fs::create_dir(kernels).unwrap();
    for entry in std::fs::read_dir(root().join("kernels")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "h" || extension == "cu") {
            std::fs::copy(&path, kernels.join(path.file_name().unwrap())).unwrap();
        }
    }
    let path = kernels.join(bug.file);
    let text = std::fs::read_to_string(&path).unwrap();
    assert_eq!(text.matches(bug.from).count(), 1, "{}: not in {} once", bug.name, bug.file);
    std::fs::write(path, text.replace(bug.from, bug.to)).unwrap();
}

#[test]
fn every_planted_bug_is_noticed() {
    if !can_build() {
        return;
    }
    let directory = scratch_directory();
    let numbered: Vec<_> = BUGS.iter().enumerate().collect();
    for_each(&numbered, |(number, bug)| {
        let place = directory.path().join(number.to_string());
        std::fs::create_dir(&place).unwrap();
        let kernels = &place.join("kernels");
        plant(bug, kernels);
        let (element, watch) = (bug.element, bug.watch);
        let output = Cases { element, width: 128, watch, seeds: 8, kernels }.run(&place);
        let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        assert!(!output.status.success(), "nobody noticed that {}", bug.name);
        assert!(said.contains(bug.noticed), "{}: {said}", bug.name);
    });
}
